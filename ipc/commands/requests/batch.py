"""``odriver batch``: answers a file of requests into a file of results, which it can resume."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from driver.text.template_words import template_names
from ipc.async_client import AsyncClient
from ipc.batch.batch_lines import Line, read_lines
from ipc.batch.batch_output import ID_PREFIX, SUCCESS, BatchOutput
from ipc.connection.retry import FULL
from ipc.errors import BatchError, OdriverError, RequestFailed
from ipc.gateway.asking import ask, shown_prompt, tokenized
from ipc.openai.question import BodyError, Question
from ipc.openai.translation import STATUS, body_of, error_answer, param_of
from ipc.process.logs import configure_logging, stderr_console
from ipc.wire.completion import whole
from ipc.wire.escaping import one_line

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 128
"""Default number of open requests: a little more than a daemon runs at once."""
SYNC_INTERVAL = 1.0
"""Seconds between syncs: a crash of the machine may cost their results, no other crash any."""
OVERLOADED_DELAY = 1.0
"""Seconds before a retry at a full daemon that does not say when."""


def run(source: Path, target: Path, address: str, **options: Any) -> int:
    """Answer what is missing in ``target``; returns the exit code, 1 if any request failed or has no
    answer."""
    console = stderr_console()
    configure_logging(console)
    read = _reader(source)
    names = {line.custom_id for line in read()}
    if _are_same(source, target):
        raise BatchError(f"{target} has the requests: choose another file for their results")
    with BatchOutput(target) as output:
        strange = next((name for name in output.results if name not in names), None)
        if strange is not None:
            raise BatchError(f"{target} has a result of {strange!r}, which {source} has not: choose another file")
        with _bar(console, len(names), len(output.results)) as advance:
            missing = (line for line in read() if line.custom_id not in output.results)
            asyncio.run(answer(missing, output, address, advance, **options))
    failed = sum(not succeeded for succeeded in output.results.values())
    told = f"{len(output.results):,} of {len(names):,} requests are in {target}, {failed:,} of them failed"
    console.print(one_line(told), soft_wrap=True, highlight=False, markup=False, emoji=False)
    return 1 if failed or len(output.results) < len(names) else 0


def _reader(source: Path) -> Callable[[], Iterable[Line]]:
    """Reads the requests from the beginning. Those that come through a pipe, which has them once, are
    kept."""
    if source.is_file():
        return partial(read_lines, source)
    lines = list(read_lines(source))
    return lambda: lines


def _are_same(source: Path, target: Path) -> bool:
    try:
        return source.samefile(target)
    except OSError:  # most times it is not there yet; BatchOutput says what else is wrong
        return False


async def answer(
    lines: Iterable[Line],
    output: BatchOutput,
    address: str,
    advance: Callable[[], None],
    *,
    max_concurrency: int = MAX_CONCURRENCY,
    resume_timeout: float = 300.0,
    key: Path | None = None,
) -> None:
    """Answer all lines, this many at once. Raises ConnectionLost if the daemon stays away."""
    left = iter(lines)

    async def work(client: AsyncClient) -> None:
        for line in left:
            output.append(await _result(client, line))
            advance()

    async def sync_regularly() -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL)
            await asyncio.to_thread(output.sync)

    async with AsyncClient(address, resume=True, resume_timeout=resume_timeout, key=key) as client:
        syncing = asyncio.create_task(sync_regularly())
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(max_concurrency):
                    workers.create_task(work(client))
        except ExceptionGroup as failures:  # its tasks fail only for one and the same reason
            raise failures.exceptions[0] from None
        finally:
            syncing.cancel()
            with suppress(asyncio.CancelledError):
                await syncing


async def _result(client: AsyncClient, line: Line) -> dict[str, Any]:
    """The line of the output: the answer, or why there is none."""
    welcome = client.welcome
    try:
        asked = line.question(None if welcome.enable_lora else welcome.models)
        client = client.of_model(welcome.adapter_of(line.model))
        status, body = SUCCESS, await _body(client, asked, line, line.model or welcome.model)
    except BodyError as error:
        status, body = error.status, _error_body(str(error), error.status, error.code, error.param)
    except RequestFailed as error:
        status = STATUS.get(error.code, 500)
        body = _error_body(error.message, status, error.code, param_of(error.code, error.message, line.url))
    except OdriverError:
        raise  # it is about the daemon, and not about this line
    except Exception:
        logger.exception("the request %r failed", line.custom_id)
        status, body = 500, _error_body("this program failed: its log says more", 500, "internal")
    name = f"{ID_PREFIX}{line.custom_id}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": None}


def _error_body(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(error_answer(message, status, code, param))
    return body


async def _body(client: AsyncClient, asked: Question, line: Line, model: str) -> dict[str, Any]:
    while True:
        try:
            if asked.hints:
                info = await client.tokenizer_info()
                asked = asked.hinted(template_names(info.get("chat_template")))
            asked = await tokenized(client, asked)
            prompt = await shown_prompt(client, asked)
            async with ask(client, asked, None) as pieces:
                return body_of(whole([piece async for piece in pieces]), asked, model, line.custom_id, prompt)
        except RequestFailed as error:
            if error.code not in FULL:
                raise
            delay = error.retry_after_s or OVERLOADED_DELAY
        await asyncio.sleep(delay)


@contextmanager
def _bar(console: Console, total: int, done: int) -> Iterator[Callable[[], None]]:
    """A progress bar; each call of what this yields advances it. Log lines appear above it."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("requests", total=total, completed=done)
        yield lambda: bar.update(task, advance=1)
