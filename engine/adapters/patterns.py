"""The regular expressions of an adapter's configuration, which is read while a daemon serves.

Other threads run while one is matched, which ``re`` would not let them, and one that takes too long
is refused.
"""

import regex

from engine.adapters.adapter import AdapterError

LONGEST = 10_000
"""Characters of an expression."""
SECONDS = 5.0
"""For one name: whoever repeats what is repeated asks for years."""


def check_pattern(origin: str, pattern: str) -> None:
    """Raises AdapterError for what is no expression."""
    try:
        if len(pattern) > LONGEST:
            raise regex.error("it is too long")
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise AdapterError(f"{origin}: {pattern[:50]} is no pattern of modules: {error}") from error


def matched(pattern: str, name: str, *, whole: bool = False) -> "regex.Match[str] | None":
    """The match of the beginning of a name, or of the ``whole``. Raises AdapterError if it takes
    too long."""
    match = regex.fullmatch if whole else regex.match
    try:
        return match(pattern, name, timeout=SECONDS, concurrent=True)
    except TimeoutError as error:
        raise AdapterError(f"the pattern of modules {pattern[:50]} takes too long to match {name}") from error
