"""What may go wrong with a repository of the Hugging Face hub, in words, and what to do."""

from huggingface_hub import constants, errors, get_token

from engine.errors import ConfigurationError, DownloadFailed

UNAUTHORIZED, FORBIDDEN = 401, 403


def problem(repository: str, revision: str | None, error: Exception) -> ConfigurationError:
    """The error to raise; a DownloadFailed if another attempt may succeed."""
    match error:
        case errors.HfHubHTTPError():
            return _refusal(repository, revision, error)
        case errors.LocalEntryNotFoundError() | errors.DryRunError():
            cause = error.__cause__
            return (
                _refusal(repository, revision, cause)
                if isinstance(cause, errors.HfHubHTTPError)
                else _absence(repository, cause or error)
            )
        case errors.HFValidationError():
            return ConfigurationError(
                f"{repository} is neither a directory nor a name of the Hugging Face hub: {error}"
            )
        case OSError() if error.errno is not None:
            return ConfigurationError(
                f"cannot write in {constants.HF_HUB_CACHE}: {error.strerror}: set HF_HOME to a directory that can"
            )
        case RuntimeError():  # hf_xet's, whatever breaks; it has tried again by itself
            return DownloadFailed(
                f"{repository}: it does not come through Xet, in which {constants.ENDPOINT} stores it: {error}. By plain "
                "HTTP it does with HF_HUB_DISABLE_XET=1"
            )
    why = str(error) or type(error).__name__
    return DownloadFailed(f"{repository}: what {constants.ENDPOINT} sends does not come whole: {why}")


def _refusal(repository: str, revision: str | None, error: errors.HfHubHTTPError) -> ConfigurationError:
    hub, status = constants.ENDPOINT, error.response.status_code
    match error:
        case errors.GatedRepoError():
            return ConfigurationError(
                f"{repository} is gated: ask for access at {hub}/{repository}, and set HF_TOKEN to a token of the "
                "account that has it"
            )
        case errors.RevisionNotFoundError():
            return ConfigurationError(f"{repository} has no revision {revision}: see {hub}/{repository}/tree/main")
        case errors.RepositoryNotFoundError():
            who = "your token may not read it" if get_token() else "it is private: then set HF_TOKEN"
            return ConfigurationError(
                f"{repository} is no directory here, and {hub} has no model of that name, or {who}"
            )
    if status == UNAUTHORIZED:
        return ConfigurationError(
            f"{repository}: {hub} does not accept your token: set HF_TOKEN to one that is valid, or unset it for a "
            "public model"
        )
    if status == FORBIDDEN:
        return ConfigurationError(
            f"{repository}: your token may not read it: give it that permission at {hub}/settings/tokens"
        )
    return DownloadFailed(f"{repository}: {hub} answers {status}: {error.server_message or error}")


def _absence(repository: str, error: BaseException) -> ConfigurationError:
    """It is not in the cache, or not all of it, and the hub was not asked or did not answer."""
    if constants.is_offline_mode():
        return ConfigurationError(
            f"{repository} is not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it, or "
            f"`hf download {repository}`"
        )
    return DownloadFailed(
        f"{repository}: {constants.ENDPOINT} cannot be reached ({error}). Without a network: on a machine that has "
        f"one `hf download {repository} --local-dir DIR`, and here serve a copy of DIR"
    )
