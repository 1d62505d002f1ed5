"""Splitting reasoning, ``<think>...</think>``, from content in a text that comes in pieces."""

from typing import Literal, NamedTuple

from ipc.gateway.output.markers import before
from ipc.gateway.output.output_events import Content, OutputEvent, Reasoning, joined


class ReasoningFormat(NamedTuple):
    """The reasoning format of a family of models: between ``start`` and ``end``.

    With ``always`` an answer begins with reasoning even if neither the prompt nor the model has
    written ``start``.
    """

    start: str
    end: str
    always: bool


REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>", always=False),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
}
"""By vLLM's names of them."""


def reasoning_format_of(chat_template: str) -> ReasoningFormat | None:
    """The reasoning format of a model: its chat template has both marks."""
    row = REASONING_FORMATS["qwen3"]
    return row if row.start in chat_template and row.end in chat_template else None


class ReasoningParser:
    """Splits one answer into the same events however its text is cut into pieces.

    ``opened`` is the end of the prompt: True inside the marks (the template opens them), False
    after ``end`` (the template turns reasoning off), None otherwise. Whitespace around the marks
    is dropped. Reasoning without an end mark extends to the end.
    """

    def __init__(self, row: ReasoningFormat, opened: bool | None) -> None:
        self._row = row
        self._thinks = row.always if opened is None else opened
        """Whether reasoning begins with the first token, without ``start``."""
        self._place: Literal["begin", "thought", "pause", "content"] = "content" if opened is False else "begin"
        self._nothing_yet = True
        self._text = ""
        """Text of undecided meaning."""

    def feed(self, text: str) -> list[OutputEvent]:
        """What more of the text settles."""
        return self._read(text, at_end=False)

    def end(self) -> list[OutputEvent]:
        """The rest, at the end of the text."""
        return self._read("", at_end=True)

    def _read(self, text: str, *, at_end: bool) -> list[OutputEvent]:
        """The states follow each other in this order."""
        self._text += text
        if self._place == "begin":
            self._begin(at_end)
        thought = self._think(at_end) if self._place == "thought" else ""
        if self._place == "pause":
            self._text = self._text.lstrip()
            self._place = "content" if self._text else "pause"
        said = self._take(len(self._text)) if self._place == "content" else ""
        return joined([Reasoning(thought), Content(said)])

    def _begin(self, at_end: bool) -> None:
        said, start = self._text.lstrip(), self._row.start
        if said.startswith(start):
            self._text = said[len(start) :]
            self._place = "thought"
        elif at_end or not start.startswith(said):
            self._place = "thought" if self._thinks else "content"

    def _think(self, at_end: bool) -> str:
        end = self._row.end
        if self._nothing_yet:
            self._text = self._text.lstrip()
        if end in self._text:
            thought, _, self._text = self._text.partition(end)
            self._place = "pause"
            return thought.rstrip()
        settled = len(self._text) if at_end else len(before(self._text, end))
        self._nothing_yet = self._nothing_yet and not settled
        return self._take(settled)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken
