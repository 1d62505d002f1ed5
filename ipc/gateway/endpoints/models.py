"""``/v1/models``."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.answers import json_answer
from ipc.gateway.daemons import Daemons
from ipc.openai.request_bodies import BodyError


class Model(Struct, frozen=True):
    """A served model; ``max_model_len`` is in tokens, as in vLLM."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["odriver"] = "odriver"


class ModelList(Struct, frozen=True):
    """All that are served."""

    data: list[Model]
    object: Literal["list"] = "list"


async def index(request: Request) -> Response:
    """List the served models."""
    return json_answer(ModelList(await _models(request)))


async def show(request: Request) -> Response:
    """One of them."""
    name = request.path_params["model"]
    for model in await _models(request):
        if model.id == name:
            return json_answer(model)
    raise BodyError(f"no model {name!r} is served here", "model", 404, "model_not_found")


async def _models(request: Request) -> list[Model]:
    daemons: Daemons = request.app.state.daemons
    welcomes = [daemon.client.welcome for daemon in await daemons.reach()]
    models = {one.model: Model(one.model, request.app.state.started_at, one.max_model_len) for one in welcomes}
    return list(models.values())
