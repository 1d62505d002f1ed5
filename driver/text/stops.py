"""Stop strings and repetition, which end an output by its content."""

from functools import lru_cache

import numpy as np

from engine.sampling_params import RepetitionDetection


class StopStrings:
    """Passes text on up to the stop string that is complete first, the longer of two.

    The text ends at the start of the stop string, or with ``include`` at its end, however it is
    divided into pieces, and no part of a stop string is ever shown. A character costs a step or
    two, however many stop strings there are.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._trie = _trie(tuple(stops)) if stops else None
        self._node = 0
        """Of the text so far."""
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that has come."""

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """The text that can be shown; the longest suffix that could begin a stop is held back. A stop string that is
        complete in a piece that may not end the text is passed over."""
        trie, node = self._trie, self._node
        if trie is None:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            node = trie.step(node, character)
            stop = trie.complete[node]
            if stop is not None and may_end:
                self.matched = stop
                self._held = ""
                return text[: end if self._include else end - len(stop)]
        self._node = node
        shown = len(text) - trie.num_kept[node]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text that is held back, at the end: no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Trie:
    """Finds strings in a text (Aho, Corasick). A node is a prefix of some of them, 0 the empty one;
    a text is at the node that is its longest suffix.

    Most nodes have one child, which is the next node, so that a node takes some tens of bytes.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next = [""]
        """By node: the character that leads to the next node, if that is its child."""
        self._others: dict[int, dict[str, int]] = {}
        """By node: its other children, by the character that leads there."""
        self._shorter = [0]
        """By node: the longest node that is a proper suffix of it."""
        self.complete: list[str | None] = [None]
        """By node: the longest of the strings that it ends with."""
        self.num_kept = [0]
        """By node: characters at its end that begin a string and are not all of it."""
        for string in strings:
            self._add(string)
        self._link()

    def step(self, node: int, character: str) -> int:
        """Where a text is after one more character."""
        while self._next[node] != character:
            others = self._others.get(node)
            if others is not None and character in others:
                return others[character]
            if node == 0:
                return 0
            node = self._shorter[node]
        return node + 1

    def _children(self, node: int) -> dict[str, int]:
        first = {self._next[node]: node + 1} if self._next[node] else {}
        return {**first, **self._others.get(node, {})}

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            child = self._children(node).get(character)
            if child is None:
                child = len(self._next)
                if child == node + 1:
                    self._next[node] = character
                else:
                    self._others.setdefault(node, {})[character] = child
                self._next.append("")
                self._shorter.append(0)
                self.complete.append(None)
                self.num_kept.append(0)
            node = child
        self.complete[node] = string

    def _link(self) -> None:
        """Fills in what a node has of its suffixes, which are shorter and come first."""
        level, depth = [0], 0
        while level:
            below = []
            for node in level:
                children = self._children(node)
                shorter = self._shorter[node]
                self.complete[node] = self.complete[node] or self.complete[shorter]
                self.num_kept[node] = depth if children else self.num_kept[shorter]
                for character, child in children.items():
                    self._shorter[child] = self.step(shorter, character) if node else 0
                    below.append(child)
            level, depth = below, depth + 1


_trie = lru_cache(maxsize=64)(_Trie)
"""The samples of a request share one."""


class RepetitionDetector:
    """Looks at the end for a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens,
    ``min_count`` times in a row.

    It counts for each size how many tokens in a row have equalled the one that many tokens before.
    A token costs one comparison for each size, in numpy.
    """

    def __init__(self, detection: RepetitionDetection) -> None:
        self._sizes = np.arange(detection.min_pattern_size, detection.max_pattern_size + 1)
        self._needed = self._sizes * (detection.min_count - 1)
        self._runs = np.zeros(len(self._sizes), np.int64)
        self._recent = np.full(detection.max_pattern_size, -1)
        """The last tokens, as a ring buffer."""
        self._count = 0

    def add(self, token_id: int) -> bool:
        """Whether this token completes the repetition."""
        before = self._recent[(self._count - self._sizes) % len(self._recent)]
        self._runs = np.where(before == token_id, self._runs + 1, 0)
        self._recent[self._count % len(self._recent)] = token_id
        self._count += 1
        return bool((self._runs >= self._needed).any())
