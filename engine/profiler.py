"""Writes traces of what device and host do: one at a time, of the whole process, for xprof, TensorBoard or Perfetto."""

from pathlib import Path

import jax


class ProfilerError(Exception):
    """What was asked for can't be done now; the message says why."""


class Profiler:
    """Starts and stops; one thread uses it. A trace that is not stopped is not written."""

    def __init__(self) -> None:
        self._directory: str | None = None

    def start(self, directory: str) -> None:
        """Begin; raises ProfilerError where a trace is under way, or the directory is there already or cannot be made.

        One that is new has nothing in it that leads elsewhere.
        """
        if self._directory is not None:
            raise ProfilerError(f"a profile for {self._directory} is running already: stop it first")
        try:
            Path(directory).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(directory).mkdir(mode=0o700)
            jax.profiler.start_trace(directory)
        except FileExistsError as error:
            raise ProfilerError(f"{error.filename} is there already: choose another name") from error
        except (OSError, RuntimeError) as error:
            raise ProfilerError(f"cannot profile into {directory}: {error}") from error
        self._directory = directory

    def stop(self) -> str:
        """End and write the files; the directory they are in. Raises ProfilerError where none is under way."""
        if self._directory is None:
            raise ProfilerError("no profile is running: start one first")
        directory, self._directory = self._directory, None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise ProfilerError(f"the profile for {directory} cannot be written: {error}") from error
        return directory
