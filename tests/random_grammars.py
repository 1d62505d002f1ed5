"""Random patterns and JSON schemas, small enough that a random text may come to an end."""

import random
from typing import Any

# Not \d or \w: what they are depends on the version of Unicode, and Python's is another.
CLASSES = ["[a-f]", "[0-9]", "[A-Z_]", "[^a-z ]", "[^\n]", ".", "é", r"\.", " ", "ab", "x"]


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """In the syntax that Python and Rust share."""
    if depth == 0:
        return rng.choice(CLASSES)
    kind = rng.randrange(5)
    inner = random_regex(rng, depth - 1)
    if kind == 0:
        return inner + random_regex(rng, depth - 1)
    if kind == 1:
        return f"({inner}|{random_regex(rng, depth - 1)})"
    if kind == 2:
        low = rng.randrange(1, 4)
        return f"({inner}){{{low},{low + rng.randrange(4)}}}"
    return f"({inner})?{random_regex(rng, depth - 1)}" if kind == 3 else inner


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of the keywords that are most in use; whatever it allows is short."""
    kinds = ["string", "integer", "boolean", "enum", "null", "number"]
    kind = rng.choice(kinds if depth == 0 else ["object", "object", "array", "anyOf", *kinds])
    if kind == "object":
        return _random_object(rng, depth)
    if kind == "array":
        low = rng.randrange(3)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "string":
        return _random_string(rng)
    if kind == "enum":
        return {"enum": rng.sample(["red", 'gr"een', "blå", 1, 2.5, None, True, ["x"]], rng.randrange(1, 5))}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}
    return {"type": "number", "minimum": 0, "maximum": 10} if kind == "number" else {"type": kind}


def _random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "a b", "ünique", "x"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": names[: rng.randrange(len(names) + 1)],
        "additionalProperties": False,
    }


def _random_string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": f"^{random_regex(rng, 2)}$"}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    return {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + rng.randrange(10)}
