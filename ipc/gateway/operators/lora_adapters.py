"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ipc.control_client import ControlClient
from ipc.gateway.bodies import read
from ipc.gateway.operators.operator_commands import commanded, parameters


class LoadLoRAAdapterRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``lora_path`` is below the daemon's ``--adapter-root``, and the name unless it is given.

    An adapter that is loaded is refused, unless ``load_inplace`` gives it a new version.
    """

    lora_name: str
    lora_path: str | None = None
    load_inplace: bool = False


class UnloadLoRAAdapterRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the adapter."""

    lora_name: str


async def load(request: Request) -> Response:
    """Load an adapter; it is there when the answer is."""
    parameters(request)
    body = await read(request, LoadLoRAAdapterRequest)

    def command(control: ControlClient) -> str:
        return control.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)

    return _said(await commanded(request, command))


async def unload(request: Request) -> Response:
    """Unload one; requests that are open go on with it."""
    parameters(request)
    body = await read(request, UnloadLoRAAdapterRequest)
    return _said(await commanded(request, partial(ControlClient.unload_adapter, name=body.lora_name)))


def _said(lines: str) -> Response:
    return PlainTextResponse(f"{lines}\n")
