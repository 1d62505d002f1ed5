"""``/v1/models``."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.access.authentication import caller_of
from ipc.gateway.answers import json_answer
from ipc.gateway.upstream.daemons import daemons_of
from ipc.openai.translation import check_model


class Model(Struct, frozen=True):
    """A name of a served model, or an adapter; ``max_model_len`` is in tokens, as in vLLM.

    ``root`` is the model's first name, or where an adapter came from, and ``parent`` the model that
    an adapter is of. ``default_sampling_params`` are its own values of what
    requests leave out.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    default_sampling_params: dict[str, float]
    parent: str | None = None
    object: Literal["model"] = "model"
    owned_by: Literal["odriver"] = "odriver"


class ModelList(Struct, frozen=True):
    """All that are served."""

    data: list[Model]
    object: Literal["list"] = "list"


async def index(request: Request) -> Response:
    """List the served models, and the adapters that the caller may use."""
    return json_answer(ModelList(list((await _models(request)).values())))


async def show(request: Request) -> Response:
    """One of them."""
    name, models = request.path_params["model"], await _models(request)
    check_model(name, list(models))
    return json_answer(models[name])


async def _models(request: Request) -> dict[str, Model]:
    """By name."""
    created, caller = request.app.state.started_at, caller_of(request)
    adapters = await daemons_of(request).ask_each(lambda daemon: daemon.adapters(caller))
    welcomes = [daemon.client.welcome for daemon in adapters]
    models = {
        name: Model(name, created, one.model, one.max_model_len, one.default_sampling_params)
        for one in welcomes
        for name in one.models
    }
    of_adapters = {
        row["name"]: Model(
            row["name"],
            int(row["loaded_at"]),
            row["path"],
            one.max_model_len,
            one.default_sampling_params,
            parent=one.model,
        )
        for one, rows in zip(welcomes, adapters.values(), strict=True)
        for row in rows
    }
    return models | {name: model for name, model in of_adapters.items() if name not in models}
