"""Errors that the device raises, and its acquisition."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.errors import JaxRuntimeError

from engine.errors import DevicesUnavailable

_REFUSAL = re.compile(r"Unable to initialize backend '\w+': (.*?)( \((?:set|you may need)[^()]*\))?$", re.DOTALL)
_STATUS = re.compile(r"[A-Z_]+: ")
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class DeviceError(Exception):
    """A computation or allocation failed. The message is the first line of the device's error."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the device was out of memory."""
        return _OUT_OF_MEMORY in str(self)


def acquire_devices() -> None:
    """Initialize JAX's devices, which this process then holds. Raises DevicesUnavailable."""
    try:
        jax.devices()
    except RuntimeError as error:
        refused = _REFUSAL.match(str(error))
        raise DevicesUnavailable(refused[1] if refused else str(error)) from error


@contextmanager
def device_errors() -> Iterator[None]:
    """Convert the device's errors to DeviceError.

    They are JaxRuntimeErrors. A CPU that is out of memory raises a ValueError instead (jax
    0.10.2), which begins with the name of an XLA status.
    """
    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        words = str(error).partition("\n")[0]
        if not isinstance(error, JaxRuntimeError) and not _STATUS.match(words):
            raise
        raise DeviceError(words) from error
