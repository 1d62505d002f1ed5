"""``odriver bench``: a load against a running daemon, shown as a table and saved as JSON."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ipc.benchmark.timeline import Timeline, load_figures
from ipc.benchmark.workload import Load, LoadError, send
from ipc.client import Client
from ipc.process.logs import stderr_console
from ipc.process.tables import plain

_GROUPS = {
    "ttft": "time to first token",
    "tpot": "time per output token, but the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_STATISTICS = ("mean", "median", "std", "p99")


def run(client: Client, load: Load, path: Path | None, *, save: bool) -> int:
    """Run the load, show the figures and save them; returns 1 if any request failed.

    Raises LoadError, before anything is sent, where they cannot be saved.
    """
    described = describe(client, load)
    path = path or Path(default_name(described))
    with _opened(path) if save else nullcontext() as file:
        figures, timelines = measure(client, load, stderr_console())
        result = described | figures
        if file is not None:
            _save(result, file, path)
    show(result, timelines, Console())
    return 1 if result["failed"] else 0


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
    """The file, which keeps what it has until there is something to put in its place; a new one is
    gone again where nothing is."""
    is_new = not os.path.lexists(path)
    try:
        file = FileIO(path, "a")
    except OSError as error:
        raise _unsaved(path, error) from error
    with file:
        try:
            yield file
        except BaseException:
            if is_new:
                path.unlink(missing_ok=True)
            raise


def _save(result: dict[str, Any], file: FileIO, path: Path) -> None:
    text = json.dumps(result, indent=2).encode() + b"\n"
    try:
        if path.is_file():
            file.truncate(0)
        while text:
            text = text[file.write(text) :]
    except OSError as error:
        raise _unsaved(path, error) from error


def _unsaved(path: Path, error: OSError) -> LoadError:
    return LoadError(f"the figures cannot be saved in {path}: {error.strerror}")


def measure(client: Client, load: Load, console: Console) -> tuple[dict[str, Any], list[Timeline]]:
    """The figures, and what became of each request; a bar on the console meanwhile.

    Raises RequestFailed, before anything is measured, where the daemon can't serve such a request.
    """
    prompts = load.prompts(client.welcome.vocab_size)
    client.complete(prompts[0], **load.params())
    with _bar(console) as bar:
        task = bar.add_task("requests", total=load.num_prompts, tokens=0)

        def count(timeline: Timeline) -> None:
            bar.update(task, advance=1, tokens=bar.tasks[task].fields["tokens"] + timeline.tokens)

        began = time.monotonic()
        timelines = send(
            client, prompts, load.params(), times=load.send_times(), max_concurrency=load.max_concurrency, on_end=count
        )
        duration = time.monotonic() - began
    return load_figures(timelines, duration), timelines


def describe(client: Client, load: Load) -> dict[str, Any]:
    """The load and its target, by the names of ``vllm bench serve``."""
    return {
        "date": datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        "backend": "odriver",
        "model_id": client.model,
        "num_prompts": load.num_prompts,
        "request_rate": load.request_rate if load.request_rate < float("inf") else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
    }


def default_name(result: dict[str, Any]) -> str:
    """The name of a file to save to, where none is given."""
    # The model id is the daemon's text and must not become a path.
    model = re.sub(r"[^\w.-]", "-", result["model_id"])
    return f"odriver-{result['request_rate']}qps-{model}-{result['date']}.json"


def show(result: dict[str, Any], timelines: Sequence[Timeline], console: Console) -> None:
    """Print the figures, and why requests failed."""
    table = Table(title=plain(f"oDriver, {result['model_id']}", "table.title"), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("requests completed", f"{result['completed']:,} of {result['num_prompts']:,}")
    table.add_row("duration", f"{result['duration']:.2f} s")
    table.add_row("tokens in, out", f"{result['total_input_tokens']:,}, {result['total_output_tokens']:,}")
    table.add_row("requests a second", f"{result['request_throughput']:.2f}")
    table.add_row("tokens out a second", f"{result['output_throughput']:,.1f}")
    table.add_row("tokens in and out a second", f"{result['total_token_throughput']:,.1f}")
    console.print(table)
    console.print(_latencies(result))
    for error in sorted({timeline.error for timeline in timelines if timeline.error}):
        count = sum(timeline.error == error for timeline in timelines)
        console.print(plain(f"{count} failed: {error}", "red"))


def _latencies(result: dict[str, Any]) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("")
    for statistic in _STATISTICS:
        table.add_column(statistic, justify="right")
    for name, words in _GROUPS.items():
        table.add_row(words, *(f"{result[f'{statistic}_{name}_ms']:,.2f}" for statistic in _STATISTICS))
    return table


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
