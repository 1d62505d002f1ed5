"""What messages consist of: their fields' types and limits, and what a message is."""

import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from engine.request_limits import (
    MAX_MESSAGES,
    MAX_MODEL_LENGTH,
    MAX_PATH_LENGTH,
    MAX_REQUEST_ID_LENGTH,
    MAX_TENSOR_NAME_LENGTH,
    MAX_TOOLS,
)

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII: it is written into logs and onto terminals verbatim."""
Messages = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
TraceParent = Annotated[str, Meta(pattern=rf"\A({TRACEPARENT.pattern})?\Z")]
"""W3C's ``traceparent``, or nothing."""
TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_TENSOR_NAME_LENGTH)]
"""As in a checkpoint."""
User = Annotated[str, Meta(max_length=128)]
Model = Annotated[str, Meta(max_length=MAX_MODEL_LENGTH)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=MAX_PATH_LENGTH)]
ProfileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""The name of a directory in the daemon's profile directory: no path, and nothing hidden."""


class Message(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
    tag=lambda name: re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(),
):
    """A message with its own name as its type: AbortRequest is ``abort_request``."""
