"""``/metrics``: the daemons' metrics for Prometheus."""

import re
from collections.abc import Collection, Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.access.authentication import caller_of
from ipc.gateway.access.callers import Caller
from ipc.gateway.upstream.daemons import daemons_of
from ipc.gateway.upstream.remote_daemon import RemoteDaemon

TEXT = "text/plain; version=0.0.4; charset=utf-8"
ADAPTERS = re.compile(r'((?:running|waiting)_lora_adapters=)"([^"]*)"')
"""A label of ``vllm:lora_requests_info``: names with commas between them."""


async def show(request: Request) -> Response:
    """The metrics of one daemon as they are; of several, labelled with the daemon."""
    daemons, caller = daemons_of(request), caller_of(request)
    texts = await daemons.ask_each(lambda daemon: _shown(daemon, caller))
    if len(list(daemons)) == 1:
        return Response("".join(texts.values()), media_type=TEXT)
    return Response(merged({daemon.address: text for daemon, text in texts.items()}), media_type=TEXT)


async def _shown(daemon: RemoteDaemon, caller: Caller) -> str:
    """Its metrics, without the names of adapters that the caller may not use."""
    text = await daemon.metrics()
    if caller.limits is None or caller.limits.key is None:  # then it is the gateway's, which may use all
        return text
    names = {row["name"] for row in await daemon.adapters(caller)}
    return ADAPTERS.sub(lambda label: f'{label[1]}"{_of(names, label[2])}"', text)


def _of(names: Collection[str], listed: str) -> str:
    return ",".join(name for name in listed.split(",") if name in names)


def merged(texts: dict[str, str]) -> str:
    """The metrics of several as one text: each family once, each sample labelled ``daemon``."""
    return generate_latest(_Merged(texts)).decode()


class _Merged(Collector):
    """The metric families of all daemons, by daemon."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """Yield each family once, described as the first daemon describes it."""
        families: dict[str, Metric] = {}
        for daemon, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, "daemon": daemon}))
        return families.values()
