"""What the device could not do, in its own words."""

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
    """A computation or an allocation failed; the message has the first line of what the device said."""

    @property
    def out_of_memory(self) -> bool:
        """Whether there was no memory for it."""
        return _OUT_OF_MEMORY in str(self)


def acquire_devices() -> None:
    """Have JAX look for devices and take them, for as long as this process lives. Raises DevicesUnavailable."""
    try:
        jax.devices()
    except RuntimeError as error:
        refused = _REFUSAL.match(str(error))
        raise DevicesUnavailable(refused[1] if refused else str(error)) from error


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises DeviceError for what jax raises in the device's name.

    That is a JaxRuntimeError; but a CPU that is out of memory comes as a ValueError (jax 0.10.2), to be told from other
    ones by the name of an XLA status at its beginning.
    """
    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        words = str(error).partition("\n")[0]
        if not isinstance(error, JaxRuntimeError) and not _STATUS.match(words):
            raise
        raise DeviceError(words) from error
