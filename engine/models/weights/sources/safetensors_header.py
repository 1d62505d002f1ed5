"""The head of a safetensors file: a length of 8 bytes, and JSON with every tensor's place."""

import math
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

MAX_HEADER_BYTES = 100 * 2**20
"""As in the safetensors library."""
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""The dtypes that are read, by the names of the format."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Of its bytes, from the end of the header."""


def header_size(first: bytes) -> int:
    """The bytes of the JSON, from the first 8 of a file. Raises ValueError if it cannot be one."""
    size = int.from_bytes(first[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {size:,} bytes")
    return size


def entries(header: bytes) -> dict[str, Entry]:
    """The tensors of a file by name. Raises msgspec.DecodeError, and ValueError for one with more or fewer bytes than
    its shape has and for a header that is nested too deeply."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()}
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    for name, entry in found.items():
        begin, end = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)  # others are refused where the tensor is asked for
        if dtype is not None and math.prod(entry.shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} has {end - begin:,} bytes, which are not those of its shape")
    return found
