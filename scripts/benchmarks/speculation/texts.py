"""Prompts by what their greedy continuation does: repeat the prompt, in runs that differ, seem to, or say something new.

For *small* with a language a prompt is a passage of the model's own text in which some words are others, and then the
passage's first words: what follows is the passage as it was. A lookup in the prompt drafts it up to the next word that
differs. How the words that are kept and those that are not take turns is what the kinds differ in.

For the demo model the prompts are committed, in demo_prompts.json. It copies nothing from a prompt. ``sums`` are lists of
sums that it goes on with in the same words; ``stories`` are told again with phrases that they share; ``new`` are short
beginnings of stories.
"""

from pathlib import Path

import msgspec
import numpy as np

from scripts.benchmarks.speculation.language import FIRST_WORD, circle

PASSAGE, CUE = 192, 4
"""Tokens of a passage, of which the continuation says the rest, and of its first words, said again at the end."""
KINDS = {"edit": (15, 1), "extraction": (24, 8), "calls": (12, 4), "seeming": (2, 1), "new": (0, 1)}
"""Words that are kept, and then others in their places, over and over: a file of which few words change; parts of a text;
calls of a tool with other arguments; two words that are always followed by another one than in the prompt; a passage of
which the prompt says nothing."""
DEMO = Path(__file__).with_name("demo_prompts.json")


class Passages:
    """Prompts of one kind for *small* with a language; no two of one object begin at the same word."""

    def __init__(self, kind: str, vocabulary: int) -> None:
        self._kept, self._others = KINDS[kind]
        self._circle = circle(vocabulary)
        self._rng = np.random.default_rng(0)
        self._starts = iter(self._rng.permutation(len(self._circle) - PASSAGE))

    def take(self, count: int) -> list[list[int]]:
        """``count`` new prompts of PASSAGE + CUE tokens."""
        return [self._prompt(int(next(self._starts))) for _ in range(count)]

    def _prompt(self, start: int) -> list[int]:
        passage = self._circle[start : start + PASSAGE]
        is_other = np.arange(PASSAGE) % (self._kept + self._others) >= self._kept
        others = self._rng.integers(FIRST_WORD, FIRST_WORD + len(self._circle), PASSAGE)
        prompt: list[int] = np.where(is_other, others, passage).tolist()
        return prompt + passage[:CUE].tolist()


def demo_texts() -> dict[str, list[str]]:
    """The committed prompts for the demo model, by kind."""
    return msgspec.json.decode(DEMO.read_bytes(), type=dict[str, list[str]])
