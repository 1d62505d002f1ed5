"""How cleanly the model we ship writes at several temperatures. Its generation_config.json has the values chosen by this.

    python -m scripts.demo.judge --temperatures 1 0.8 0.6 --top-ps 1 0.9 --samples 1000

A text has a broken word if no training story has that word. It has a stray name if it names somebody who is neither
the hero, whose name comes first, nor introduced as a friend.
"""

import argparse
import re
from collections.abc import Iterable
from itertools import product
from random import Random
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from driver.text.tokenizer import HuggingFaceTokenizer
from engine.build import build_engine
from engine.config import EngineConfig
from engine.hub.names import DEMO_MODEL
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from scripts.demo.cast import all_names
from scripts.demo.stories import tell_story

BEGINNINGS = ("Once upon a time", "One day, a fox", "There was a girl", "The little robot")
"""Equally many of the samples begin with each."""
MAX_TOKENS = 512
STORIES = 30_000
"""Stories from which words are collected: more have no further words."""
_WORD = re.compile(r"[^\W\d_]+")
_NAMED = re.compile(r"(friend (?:called )?)?\b([A-Z]\w*)")


class Verdict(NamedTuple):
    """What is wrong with a text."""

    broken_words: list[str]
    stray_names: list[str]


class Judge:
    """Knows the words of the training stories."""

    def __init__(self, stories: int = STORIES) -> None:
        rng, names = Random(0), all_names()
        told = {word for _ in range(stories) for word in _WORD.findall(tell_story(rng))}
        self._words = {word.lower() for word in told - names}
        self._names = {name for name in names if name.lower() not in self._words}

    def judge(self, story: str) -> Verdict:
        """What is wrong with a story."""
        words = [word for word in _WORD.findall(story) if word not in self._names]
        known: set[str] = set()
        stray = []
        for friend, name in _NAMED.findall(story):
            if name in self._names:
                if friend or not known:
                    known.add(name)
                stray += [name] * (name not in known)
        return Verdict([word for word in words if word.lower() not in self._words], stray)


def write(engine: oEngine, tokenizer: HuggingFaceTokenizer, samples: int, params: SamplingParams) -> list[str]:
    """So many stories. The sample's number is its seed."""
    told: dict[str, list[int]] = {}
    for number in range(samples):
        prompt = tokenizer.encode(BEGINNINGS[number % len(BEGINNINGS)])
        told[str(number)] = list(prompt)
        eos = frozenset(engine.limits.eos_token_ids)
        engine.add(Sequence(str(number), prompt, params, eos, MAX_TOKENS, seed=number))
    while engine.has_work:
        for output in engine.step():
            told[output.request_id] += output.token_ids
    return [tokenizer.decode(token_ids) for token_ids in told.values()]


def show(settings: Iterable[tuple[float, float]], samples: int) -> None:
    """Print a line for each temperature and top_p."""
    engine, tokenizer, judge = build_engine(EngineConfig(), lambda _: None), HuggingFaceTokenizer(DEMO_MODEL), Judge()
    columns = ("temperature", "top_p", "clean", "broken words", "stray names", "different", "for example")
    table = Table(*columns, title=f"{samples} stories each")
    for temperature, top_p in settings:
        stories = write(engine, tokenizer, samples, SamplingParams(temperature=temperature, top_p=top_p))
        verdicts = [judge.judge(story) for story in stories]
        broken = [verdict for verdict in verdicts if verdict.broken_words]
        stray = [verdict for verdict in verdicts if verdict.stray_names]
        clean = sum(verdict == ([], []) for verdict in verdicts)
        example = " ".join(word for verdict in broken[:3] for word in verdict.broken_words[:1])
        counts = (clean, len(broken), len(stray), len(set(stories)))
        table.add_row(f"{temperature:g}", f"{top_p:g}", *(f"{count / samples:.1%}" for count in counts), example)
    Console(width=100).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1, 0.8, 0.6, 0.4])
    parser.add_argument("--top-ps", type=float, nargs="+", default=[1, 0.9])
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    show(product(options.temperatures, options.top_ps), options.samples)
