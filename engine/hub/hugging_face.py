"""Repositories of the Hugging Face hub, in its cache.

huggingface_hub has the rules: where the cache is (HF_HOME), who asks (HF_TOKEN, or ``hf auth
login``), whom (HF_ENDPOINT), and whether at all (HF_HUB_OFFLINE). A file that has come is kept,
and a connection that breaks is resumed where it was.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import DryRunFileInfo, HfApi, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.filesize import decimal
from tqdm import tqdm

from engine.errors import ConfigurationError
from engine.hub.problems import problem
from engine.models.weights.sources.checkpoint import INDEX_FILE, SINGLE_FILE, weight_names
from engine.models.weights.sources.easydel import ARRAYS, TENSORSTORE_INDEX
from engine.progress import Progress

Report = Callable[[Progress], None]
TOKEN = "odriver.hf-token"
"""The credential that systemd has for a service, by its name (systemd_units.py)."""
ATTEMPTS = 5
"""At one file, should its connections break in a way that huggingface_hub does not resume."""


def download_small(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """The snapshot's directory, with these files; what is cached is asked for only if it changed.

    Raises ConfigurationError, and DownloadFailed if another attempt may succeed.
    """
    with _in_words(repository, revision):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))


def download_weights(repository: str, directory: Path, report: Report, check_index: Callable[[], None] | None) -> None:
    """Complete a snapshot. Raises as ``download_small``, and first if the disk has no room, or if a ``check_index``
    refuses the tensors that the snapshot's index names, which is called where that is of the files that come."""
    if (directory / TENSORSTORE_INDEX).is_file():
        wanted = [ARRAYS]
    elif all((directory / name).is_file() for name in weight_names(directory)):
        return
    else:
        wanted = [*weight_names(directory), SINGLE_FILE]
    commit = directory.name
    with _in_words(repository, commit):
        files = _weight_files(repository, commit, wanted)
        if check_index is not None and files[0].filename != SINGLE_FILE:
            check_index()
        missing = [file for file in files if file.will_download]
        total = sum(file.file_size or 0 for file in missing)
        if total > (free := disk_usage(directory).free):
            raise ConfigurationError(
                f"the weights of {repository} are {decimal(total)}, and {constants.HF_HUB_CACHE} has {decimal(free)} "
                "left: make room, or set HF_HOME to a directory that has it"
            )
        counter = _counter(total, report)
        for file in missing:
            _download(repository, file.filename, commit, counter)


def _weight_files(repository: str, commit: str, wanted: list[str]) -> list[DryRunFileInfo]:
    """What a snapshot is to have of these files. Raises ConfigurationError if the repository has not all that its index
    names, or nothing at all."""
    files = snapshot_download(repository, revision=commit, allow_patterns=wanted, dry_run=True)
    named = {file.filename: file for file in files}
    if SINGLE_FILE in named:  # the one that weight_names prefers, where it has both
        return [named[SINGLE_FILE]]
    if absent := [name for name in wanted if name not in (*named, SINGLE_FILE, ARRAYS)]:
        raise ConfigurationError(
            f"{repository}: {INDEX_FILE} names {absent[0]}, which the repository does not have: ask its authors for it, "
            "or name another --revision"
        )
    if not files:
        raise ConfigurationError(_without_weights(repository, HfApi().list_repo_files(repository, revision=commit)))
    return files


def _download(repository: str, name: str, commit: str, counter: type[Any]) -> None:
    for left in reversed(range(ATTEMPTS)):
        try:
            hf_hub_download(repository, name, revision=commit, tqdm_class=counter)
        except errors.HfHubHTTPError:
            raise
        except HTTPError:
            if not left:
                raise
        else:
            return


def _counter(total: int, report: Report) -> type[Any]:
    """What huggingface_hub takes for a progress bar, and makes one of for each file."""
    done = 0
    report(Progress("downloading the model", 0, total, "bytes"))

    class Counter(tqdm):  # type: ignore[misc]
        """Reports the bytes of all files, and shows nothing itself."""

        monitor_interval = 0

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})
            self.counted = 0

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            self.counted += int(n or 0)
            done += int(n or 0)
            report(Progress("downloading the model", min(done, total), total, "bytes"))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes of the network, of which Xet makes those of the file."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            """Their rate."""

        def close(self) -> None:
            nonlocal done
            if self.total is not None and self.counted < self.total:  # it is begun anew
                done -= self.counted
            super().close()

    return Counter


def _without_weights(repository: str, names: list[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        has = "GGUF files, which are not read: give the repository of the model in safetensors"
    elif any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        has = "PyTorch pickles, which are not read, as they may run code: ask its authors for safetensors"
    else:
        has = f"neither {SINGLE_FILE} nor {INDEX_FILE}"
    return f"{repository} has {has}"


def _set_up() -> None:
    disable_progress_bars()  # one bar, ours, is of all files
    logging.getLogger("huggingface_hub").handlers.clear()  # its warnings are in our log
    if "CREDENTIALS_DIRECTORY" in os.environ:
        with suppress(OSError):  # a service without a token may not even look for one
            token = Path(os.environ["CREDENTIALS_DIRECTORY"], TOKEN).read_text(encoding="utf-8").strip()
            os.environ.setdefault("HF_TOKEN", token)


@contextmanager
def _in_words(repository: str, revision: str | None) -> Iterator[None]:
    _set_up()
    try:
        yield
    except (HTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        raise problem(repository, revision, error) from error
