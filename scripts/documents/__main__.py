"""scripts/check_docs: run what the pages show, against a daemon in a HOME of its own."""

import doctest
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.documents.pages import EXAMPLE, PAGES, ROOT, Block, blocks, write_files
from scripts.processes import end_on_sigterm, free_port, odriver

HTTP_PORT, METRICS_PORT = 8000, 8001
"""Those that the pages show. The check uses ports that are free."""
LIMIT = 300
"""Seconds for a command."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main(names: list[str]) -> int:
    """Check the pages of these names, or all; the exit code."""
    end_on_sigterm()
    pages = [page for page in PAGES if not names or page.name in names or page.stem in names]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="odriver-") as home:
        _live_in(Path(home))
        ports = {f"localhost:{shown}": f"localhost:{free_port()}" for shown in (HTTP_PORT, METRICS_PORT)}
        http, metrics = (port.rpartition(":")[2] for port in ports.values())
        with odriver("serve", "--http", http, "--metrics-port", metrics):
            for page in pages:
                failures = list(_failures(page, ports))
                wrong += len(failures)
                verdict = "WRONG" if failures else "ok"
                print(f"{page.relative_to(ROOT)}: {verdict}", *failures, sep="\n", flush=True)
    return 1 if wrong else 0


def _live_in(home: Path) -> None:
    """Nothing of the user's is used or changed, but the cache of what was compiled."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ODRIVER_"))}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    (home / "run").mkdir(mode=0o700)
    os.environ.clear()
    os.environ |= own | {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "XDG_CACHE_HOME": cache,
        "ODRIVER_CONFIG": os.devnull,
        "PATH": f"{Path(sys.executable).parent}:{own['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


def _failures(page: Path, ports: dict[str, str]) -> Iterator[str]:
    """What of a page is not as it says, with these addresses for those that it shows."""
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        shown = blocks(page)
        write_files(shown, Path(directory))
        for block in shown:
            for command, expected in _steps(block) if block.is_run else ():
                if difference := _difference(
                    [_with(ports, word) for word in command], _with(ports, expected), directory
                ):
                    yield f"{block.place}: {difference}"


def _steps(block: Block) -> Iterator[tuple[list[str], str]]:
    """What to run, and what it has to print; ``...`` stands for anything."""
    anything = block.note == EXAMPLE
    if block.language == "python":
        yield [sys.executable, "-c", block.text], "..." if anything or block.printed is None else block.printed
    for command, output in block.commands:
        yield ["bash", "-c", command], "..." if anything else output


def _difference(command: list[str], expected: str, directory: str) -> str | None:
    """None if it does what it should. A command may fail only where the page shows that it does."""
    done = subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode and not any(line.startswith("odriver: ") for line in expected.splitlines()):
        return f"{command[-1].strip()} ended with {done.returncode}:\n{done.stdout}"
    if not doctest.OutputChecker().check_output(expected, done.stdout, FLAGS):
        return f"{command[-1].strip()}\nprinted: {done.stdout}\nand not: {expected}"
    return None


def _with(ports: dict[str, str], text: str) -> str:
    for shown, port in ports.items():
        text = text.replace(shown, port)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
