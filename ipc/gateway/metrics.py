"""``/metrics``: what Prometheus would be told by the daemons."""

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response

from ipc.gateway.daemons import Daemons

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<value> .*)")


async def show(request: Request) -> Response:
    """The numbers of the one daemon as it says them; of several, with a label that says whose each is."""
    daemons: Daemons = request.app.state.daemons
    found = await daemons.reach()
    texts = await asyncio.gather(*(daemon.metrics() for daemon in found))
    if len(list(daemons)) == 1:
        return Response(texts[0], media_type=TEXT)
    labelled = {daemon.address: text for daemon, text in zip(found, texts, strict=True)}
    return Response(merged(labelled), media_type=TEXT)


def merged(texts: dict[str, str]) -> str:
    """Prometheus's text format of several as that of one: each family once, each sample with the label ``daemon``."""
    families: dict[str, list[str]] = {}
    for daemon, text in texts.items():
        head: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP"):
                head = families.setdefault(line.split(" ", 3)[2], [])
            if not line.startswith("#"):
                head.append(_labelled(line, daemon))
            elif line not in head:
                head.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(sample: str, daemon: str) -> str:
    match = _SAMPLE.fullmatch(sample)
    assert match is not None, sample
    labels = ",".join(filter(None, (f'daemon="{daemon}"', match["labels"])))
    return f"{match['name']}{{{labels}}}{match['value']}"
