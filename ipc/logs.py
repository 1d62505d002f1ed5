"""The daemon's log: coloured on a terminal, plain lines elsewhere, or JSON. All of it goes to stderr."""

import json
import logging
import os
from datetime import UTC, datetime

from rich.console import Console
from rich.logging import RichHandler

OURS = ("caching", "engine", "driver", "ipc")
_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def configure_logging(console: Console, level: int = logging.INFO, log_format: str = "text") -> None:
    """Send the log to the console, ours from this level on; a second call changes that. "text" or "json".

    This is the one place that adds a handler.
    """
    logging.basicConfig(handlers=[_handler(console, log_format)], level=logging.WARNING, force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(level)


def _handler(console: Console, log_format: str) -> logging.Handler:
    if log_format == "text" and console.is_terminal:
        coloured = RichHandler(console=console, show_path=False, rich_tracebacks=False)
        coloured.setFormatter(logging.Formatter("%(message)s"))
        return coloured
    plain = logging.StreamHandler(console.file)
    date = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "  # the journal dates its lines
    text = logging.Formatter(date + "%(levelname)s %(name)s: %(message)s")
    plain.setFormatter(JsonFormatter() if log_format == "json" else text)
    return plain


class JsonFormatter(logging.Formatter):
    """An object a line: time (RFC 3339, UTC), level, logger, message, and what was given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
