"""vLLM's structural tags: free text, in which what follows a trigger has a form."""

import json
from typing import Any

from msgspec import Struct

from driver.grammars.notation import WHITESPACE, string
from driver.text.json_schema import without_idle_keywords

MAX_TAGS = 512
"""Structures, and triggers: each is looked for with each."""


class TagStructure(Struct, frozen=True, forbid_unknown_fields=True):
    """JSON of this schema between two texts; ``begin`` starts with a trigger."""

    begin: str
    schema: dict[str, Any]
    end: str


def tag_grammar(structures: list[TagStructure], triggers: list[str]) -> str:
    """The grammar in llguidance's Lark notation. Raises ValueError without a structure, or where
    one has no trigger."""
    if not structures:
        raise ValueError("structures must be one or more, for a structural tag")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    rules = [f"start: ({tags})* text", "text: TEXT", "TEXT: /(?s:.*)/"]
    for number, structure in enumerate(structures):
        trigger = next((trigger for trigger in triggers if trigger and structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"structures[{number}].begin must start with one of the triggers, not {structure.begin!r}")
        rest, end = string(structure.begin[len(trigger) :]), string(structure.end)
        rules.append(f"trigger_{number}[lazy]: TEXT {string(trigger)}")
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **without_idle_keywords(structure.schema)}
        rules.append(f"tag_{number}: trigger_{number} {rest} %json {json.dumps(schema)} {end}")
    return "\n".join(rules)
