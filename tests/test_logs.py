"""The daemon's log."""

import io
import json
import logging
import re
import warnings

import pytest
from rich.console import Console

from ipc.process import logs
from ipc.process.logs import configure_logging, stderr_console
from ipc.service.terminal import show_ready


def test_json_lines_have_what_was_said_and_what_it_was_about() -> None:
    """Time, level, logger and message, the fields of the line's own, and the traceback where there is one."""
    out = io.StringIO()
    configure_logging(Console(file=out), "info", "json")

    logging.getLogger("driver.x").info("request %s ended", "a", extra={"request_id": "a", "output_tokens": 5})
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("ipc.x").exception("no")

    first, second = map(json.loads, out.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info", "logger": "driver.x", "message": "request a ended", "request_id": "a", "output_tokens": 5,
    }  # fmt: skip
    assert second["message"] == "no" and "ValueError: bad" in second["exception"]


def test_a_warning_of_pythons_is_a_record() -> None:
    """Such as jax has for a full disk: a log in JSON has no other lines."""
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        configure_logging(Console(file=out), "info", "json")

        warnings.warn("no space left", stacklevel=1)

        logging.captureWarnings(False)
    (line,) = map(json.loads, out.getvalue().splitlines())
    assert line["logger"] == "py.warnings" and "UserWarning: no space left" in line["message"]


def test_that_jaxs_cache_cannot_be_written_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk JAX says it of each function that it compiles; other warnings are not held back."""
    out = io.StringIO()
    monkeypatch.setattr(logs, "_cache_warnings", logs._CacheWarnings())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        configure_logging(Console(file=out))

        for name in ("jit_step", "jit_sample"):
            warnings.warn(
                f"Error writing persistent compilation cache entry for '{name}': OSError: no space", stacklevel=1
            )
            warnings.warn(f"{name} is slow", stacklevel=1)

        logging.captureWarnings(False)
    lines = ("jit_step': OSError", "jit_sample': OSError", "jit_step is slow", "jit_sample is slow")
    assert [out.getvalue().count(line) for line in lines] == [1, 0, 1, 1]


def test_the_level_may_change_while_running() -> None:
    """The last call holds, and lines come once; what others log is of no interest below a warning."""
    out = io.StringIO()
    for level in ("warning", "debug"):
        configure_logging(Console(file=out), level)

    logging.getLogger("engine.x").debug("seen")
    logging.getLogger("jax.x").info("not seen")

    assert len(out.getvalue().splitlines()) == 1
    assert out.getvalue().endswith("DEBUG engine.x: seen\n")


def test_a_file_is_no_terminal_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither for the log, whose lines stay whole and plain, nor for SIGHUP, which there is to reload."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = stderr_console()

    configure_logging(console)
    logging.getLogger("ipc.x").info("word " * 40)

    assert not console.is_terminal
    (line,) = capfd.readouterr().err.splitlines()
    assert "\x1b" not in line and line.endswith("INFO ipc.x: " + "word " * 40)


FORGED = "x\n2026-01-01 ERROR ipc.service.daemon: FORGED\x1b[31m\x9b2J\u2028\u202e\ud800"


@pytest.mark.parametrize("log_format", ["text", "json", "terminal"])
def test_a_record_is_a_line_whoever_chose_its_words(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a request's id or of an error's text begins a line, or is obeyed by a terminal."""
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=log_format == "terminal", width=1000, color_system=None)
    configure_logging(console, "info", log_format.replace("terminal", "text"))

    logging.getLogger("driver.x").info("request %s: %s", FORGED, ValueError(FORGED), extra={"client": FORGED})
    logging.getLogger("driver.x").info(FORGED)
    logging.getLogger("driver.x").info("%(a)s %(b)d", {"a": FORGED, "b": 3})

    lines = out.getvalue().removesuffix("\n").split("\n")
    assert len(lines) == 3 and all("FORGED" in line for line in lines)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\ud800]", out.getvalue())
    if log_format == "json":
        assert json.loads(lines[0])["client"] == FORGED and json.loads(lines[1])["message"] == FORGED


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_is_cut(log_format: str) -> None:
    """A field to hundreds of characters and a line to thousands, with the end of each still there."""
    out = io.StringIO()
    configure_logging(Console(file=out), "info", log_format)

    logging.getLogger("driver.x").info("request %s: the end", "x" * 10_000_000, extra={"error": "y" * 10_000_000})
    logging.getLogger("driver.x").info("z" * 10_000_000)

    first, second = out.getvalue().splitlines()
    assert "x[... 10,000,000 characters in all ...]x" in first and "the end" in first and len(first) < 1500
    assert "z[... 10,000,000 characters in all ...]z" in second and len(second) < 4500


def test_what_a_start_has_come_to_is_whole() -> None:
    """However many facts there are, none is cut for the others."""
    out = io.StringIO()
    console = Console(file=out)
    configure_logging(console, "info", "text")
    facts = {f"fact {number}": f"/a/path/{number}" * 20 for number in range(9)}

    show_ready(console, facts)

    assert out.getvalue().endswith(f"ready: {', '.join(f'{name} {fact}' for name, fact in facts.items())}\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_forges_no_record(log_format: str) -> None:
    """Its lines are its own, indented and cut, as an exception may quote a request, and there are not too many."""
    out = io.StringIO()
    configure_logging(Console(file=out), "info", log_format)

    for words in ("x\nERROR ipc.service.daemon: FORGED\x1b[31m\u2028", "y" * 10_000_000, "\n" * 10_000):
        try:
            raise ValueError(words)
        except ValueError:
            logging.getLogger("ipc.x").exception("no")

    assert "\x1b" not in out.getvalue() and "\u2028" not in out.getvalue()
    assert len(out.getvalue()) < 10_000
    records = [line for line in out.getvalue().split("\n") if line and not line.startswith("  ")]
    assert len(records) == 3
    assert sum("ERROR ipc.service.daemon: FORGED" in record for record in records) == (log_format == "json")
    assert "ValueError: x" in out.getvalue()
