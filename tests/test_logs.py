"""The daemon's log."""

import io
import json
import logging

from rich.console import Console

from ipc.logs import configure_logging


def test_json_lines_have_what_was_said_and_what_it_was_about() -> None:
    """Time, level, logger and message, the fields of the line's own, and the traceback where there is one."""
    out = io.StringIO()
    configure_logging(Console(file=out), logging.INFO, "json")

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


def test_the_level_may_change_while_running() -> None:
    """The last call holds, and lines come once; what others log is of no interest below a warning."""
    out = io.StringIO()
    for level in (logging.WARNING, logging.DEBUG):
        configure_logging(Console(file=out), level)

    logging.getLogger("engine.x").debug("seen")
    logging.getLogger("jax.x").info("not seen")

    assert len(out.getvalue().splitlines()) == 1
    assert out.getvalue().endswith("DEBUG engine.x: seen\n")
