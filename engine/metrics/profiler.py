"""Traces of device and host, for xprof, TensorBoard or Perfetto: one at a time, process-wide."""

import shutil
from contextlib import suppress
from pathlib import Path

import jax


class ProfilerError(Exception):
    """A profile cannot start or stop now. The message says why."""


class Profiler:
    """Starts and stops traces, from one thread. A trace that is not stopped is not written."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._unwritten: str | None = None
        """Where JAX still has a trace to write that it could not, beside which it starts no other."""

    def start(self, directory: str) -> None:
        """Start a trace in a new directory, which therefore has no links out of it.

        Raises ProfilerError if a trace is running, or the directory exists or cannot be created.
        """
        if self._directory is not None:
            raise ProfilerError(f"a profile for {self._directory} is running already: stop it first")
        try:
            self._forget_unwritten()
            Path(directory).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(directory).mkdir(mode=0o700)
            _start_trace(directory)
        except FileExistsError as error:
            raise ProfilerError(f"{error.filename} is there already: choose another name") from error
        except (OSError, RuntimeError) as error:
            raise ProfilerError(f"cannot profile into {directory}: {error}") from error
        self._directory = directory

    def stop(self) -> str:
        """Write the trace and return its directory. Raises ProfilerError if none is running."""
        if self._directory is None:
            raise ProfilerError("no profile is running: start one first")
        directory, self._directory = self._directory, None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._unwritten = directory
            raise ProfilerError(f"the profile for {directory} cannot be written: {error}") from error
        return directory

    def _forget_unwritten(self) -> None:
        """Free JAX of the trace that could not be written, and its name for another."""
        if self._unwritten is not None:
            jax.profiler.stop_trace()
            shutil.rmtree(self._unwritten, ignore_errors=True)
            self._unwritten = None


def _start_trace(directory: str) -> None:
    try:
        jax.profiler.start_trace(directory)
    except RuntimeError:
        with suppress(OSError):
            Path(directory).rmdir()  # so that its name is free
        raise
