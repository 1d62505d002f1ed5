"""The flags of ``odriver complete`` that say what form the text must have."""

import argparse
from pathlib import Path
from typing import Any

NAMES = {"json_schema": "json"}
"""Flags that are not called as the field of StructuredOutputsParams they fill."""
FLAGS = (
    "json_schema",
    "json_object",
    "regex",
    "choice",
    "grammar",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One form at most, and how JSON is written."""
    group = parser.add_argument_group("structured outputs", "at most one of the first five")
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", type=_text, metavar="FILE", help="JSON that this schema allows")
    add("--json-object", action="store_true", help="a JSON object")
    add("--regex", metavar="R", help="what matches all of this pattern")
    add("--choice", action="append", metavar="S", help="this text; given several times, one of them")
    add("--grammar", type=_text, metavar="FILE", help="what this grammar allows, in Lark's notation")
    add = group.add_argument
    add("--disable-any-whitespace", action="store_true", help="write JSON without any")
    add("--whitespace-pattern", metavar="R", help="or with what matches this around its punctuation")
    add("--disable-additional-properties", action="store_true", help="only those that the schema names")


def take(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those of ``add_arguments`` as the one parameter that they are part of."""
    asked = {NAMES.get(flag, flag): options.pop(flag) for flag in FLAGS if flag in options}
    return options | ({"structured_outputs": asked} if asked else {})


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from error
