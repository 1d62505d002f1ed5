"""Expressions, schemas and grammars that take long to compile, to follow, or more of the machine than there is."""

import json
import time
from typing import Any

from scripts.benchmarks.hostile.peer import Peer, generate
from scripts.benchmarks.hostile.registry import DAEMON, KEYED, Door, attack

FORM = {"regex": "[a-z ]+"}
BOMBS: tuple[dict[str, Any], ...] = (
    {"regex": "(?:){4294967294}a"},
    {"regex": "(a?){1000}a{1000}"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(?:(?:(?:a*)*)*)*b"},
    {"regex": "[\\w\\W]{1,100000}"},
    {"regex": "(" * 5000 + ")" * 5000},
    {"regex": "|".join(f"a{number}" for number in range(50_000))},
    {"choice": [f"{number:0300}" for number in range(10_000)]},
    {"json": {"enum": [str(number) for number in range(100_000)]}},
    {"json": {"type": "array", "minItems": 10**9, "maxItems": 2 * 10**9, "items": {"type": "string"}}},
    {"json": {"type": "string", "minLength": 10**9}},
    {"json": {"$ref": "#"}},
    {"json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 8}}, "$ref": "#/$defs/a"}},
    {"json": {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(20_000)}}},
    {"json": {"type": "string", "pattern": "^(a+)+$"}},
    {"json": json.dumps({"not": {"not": {}}})},
    {
        "grammar": "start: a\n"
        + "\n".join(f"{chr(97 + n)}: {chr(98 + n)} {chr(98 + n)}" for n in range(20))
        + '\nu: "x"'
    },
    {"grammar": 'start: start start | "a" |'},
    {"grammar": 'start: "a"{0,1000000}'},
)
STOPS = (
    "(?:){4294967294}a", "(?:){30000000}", *(f"(?:.?){{255}}\\x{number:02d}" for number in range(3)), "(a+)+$", "(?=a)*b",
)  # fmt: skip


@attack("C3: forms that never end compiling", DAEMON, KEYED)
def bombs(door: Door) -> None:
    """One after the other; whoever compiles them does so for all."""
    with Peer(door) as peer:
        for form in BOMBS:
            peer.ask(generate("b", structured_outputs=form, max_tokens=2), seconds=30)


@attack("C3, H2: stops that never end", DAEMON)
def stops(door: Door) -> None:
    """As regular expressions, if the daemon knows such a thing, and as strings that nearly match at each character."""
    with Peer(door) as peer:
        for stop in STOPS:
            peer.ask(generate("s", stop_regex=stop, max_tokens=5, n=4, ignore_eos=True))
            peer.say(generate("l", stop_regex=[stop] * 4, max_tokens=300, n=16, ignore_eos=True))
        peer.ask(generate("t", stop=["e" * 500] * 16, max_tokens=200, n=16, ignore_eos=True), seconds=30)
        time.sleep(1.0)


@attack("C4: a form for each of many samples", DAEMON)
def many_samples(door: Door) -> None:
    """More samples than there may be processes or open files, of requests that only wait."""
    with Peer(door) as peer:
        for number in range(18):
            peer.say(generate(f"g{number}", structured_outputs=FORM, n=64, max_tokens=900))
        time.sleep(door.seconds)


@attack("C4: forms that all differ", DAEMON)
def many_forms(door: Door) -> None:
    """Nothing that was compiled is of use to the next."""
    with Peer(door) as peer:
        for number in range(200):
            form = {"regex": f"[a-z]{{1,{number + 1}}}{number}"}
            peer.say(generate(f"g{number}", structured_outputs=form, n=8, max_tokens=900))
        time.sleep(door.seconds)


@attack("M7: hanging up on many samples", DAEMON)
def hang_up(door: Door) -> None:
    """What was made for them goes on costing."""
    with Peer(door) as peer:
        for number in range(6):
            peer.say(generate(f"g{number}", structured_outputs=FORM, n=64, max_tokens=900))
        time.sleep(0.5)


@attack("M11: a queue of nasty grammars", DAEMON)
def queue(door: Door) -> None:
    """Whose turn is it to be compiled?"""
    with Peer(door) as peer:
        for number in range(24):
            form = {"regex": f"((a{{1,99}}{number}){{1,50}}b?){{1,50}}"}
            peer.say(generate(f"g{number}", structured_outputs=form, max_tokens=2))
        for _ in peer.heard(door.seconds):
            pass
