"""The log, on stderr: coloured on a terminal, plain lines elsewhere, or JSON.

Messages may contain text of clients. So the formatters here make each record one line of limited
length without control characters. Only tracebacks have more lines; these are indented, so that
none looks like a record.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from threading import Lock

from rich.console import Console
from rich.logging import RichHandler

from driver.errors import shortened
from engine.request_limits import MAX_ERROR_LENGTH
from ipc.wire.escaping import LONGEST_LINE, one_line, visible_json

OURS = ("caching", "engine", "driver", "ipc")
TRACEBACK_LINES = 100
"""Lines that are logged of a traceback's beginning, and as many of its end."""
_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def stderr_console() -> Console:
    """Of stderr, a terminal only where that is one: rich would also have a file for one with
    FORCE_COLOR, and put colours and bars there, in lines of 80 columns."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def configure_logging(console: Console, level: str = "info", log_format: str = "text") -> None:
    """Send the log to the console, ours from this level on, and Python's warnings; a second call
    changes that. "text" or "json".

    This is the one place that adds a handler.
    """
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addFilter(_cache_warnings)
    logging.basicConfig(handlers=[_handler(console, log_format)], level=logging.WARNING, force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Log of ours what is of this level or above."""
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def _handler(console: Console, log_format: str) -> logging.Handler:
    if log_format == "text" and console.is_terminal:
        coloured = RichHandler(console=console, show_path=False, rich_tracebacks=False)
        coloured.setFormatter(TextFormatter("%(message)s"))
        return coloured
    plain = logging.StreamHandler(console.file)
    date = "" if "JOURNAL_STREAM" in os.environ else "%(asctime)s "  # the journal dates its lines
    text = TextFormatter(date + "%(levelname)s %(name)s: %(message)s")
    plain.setFormatter(JsonFormatter() if log_format == "json" else text)
    return plain


class _CacheWarnings(logging.Filter):
    """Lets one of JAX's warnings pass that an entry of its cache cannot be written: of a full disk it has one for each
    function."""

    UNWRITTEN = "Error writing persistent compilation cache entry"

    def __init__(self) -> None:
        super().__init__()
        self._first = Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it passes."""
        return self.UNWRITTEN not in record.getMessage() or self._first.acquire(blocking=False)


_cache_warnings = _CacheWarnings()


class TextFormatter(logging.Formatter):
    """A line for people, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with control characters escaped."""
        record.message = one_line(_message(record))
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [self.formatMessage(record)]
        if record.exc_info:
            lines += _traceback(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _traceback(record.stack_info)
        return "\n  ".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(_message(record), LONGEST_LINE),
        }
        line |= {name: _field(value) for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["exception"] = "\n".join(_traceback(self.formatException(record.exc_info)))
        return visible_json(json.dumps(line, default=lambda value: _field(str(value)), ensure_ascii=False))


def _message(record: logging.LogRecord) -> str:
    """The message, each of its fields shortened."""
    args = record.args
    if isinstance(args, Mapping):
        return str(record.msg) % {name: _field(value) for name, value in args.items()}
    return str(record.msg) % tuple(map(_field, args)) if args else str(record.msg)


def _field(value: object) -> object:
    return shortened(value) if isinstance(value, str) else value


def _traceback(text: str) -> list[str]:
    lines = text.splitlines()
    left_out = len(lines) - 2 * TRACEBACK_LINES
    if left_out > 0:
        lines[TRACEBACK_LINES:-TRACEBACK_LINES] = [f"... ({left_out:,} more lines)"]
    return [one_line(line, MAX_ERROR_LENGTH) for line in lines]
