"""Splitting reasoning, such as ``<think>...</think>``, from content in a text that comes in pieces."""

from typing import Literal, NamedTuple

from ipc.gateway.output.markers import before, behind_space, without_space
from ipc.gateway.output.output_events import Content, OutputEvent, Reasoning, joined

Place = Literal["begin", "thought", "pause", "wrapped", "unwrapped", "content"]
"""Where the parser is in an answer."""


class ReasoningFormat(NamedTuple):
    """The reasoning format of a family of models: between ``start`` and ``end``.

    With ``always`` an answer begins with reasoning even if neither the prompt nor the model has
    written ``start``. Content is between the marks ``content``, which may be missing. With
    ``special`` the text has the marks only if special tokens are asked for. With ``between`` the
    marks that end are the beginning of a next message: prompts end with them as well, and the last
    content without. ``calls`` ends reasoning, too, and is content: what calls of functions begin with that
    come in the middle of it. With ``channels`` an answer is of messages, which ``HarmonyParser`` reads.
    """

    start: str
    end: str
    always: bool = False
    content: tuple[str, str] = ("", "")
    special: bool = False
    between: bool = False
    calls: str = ""
    channels: bool = False
    evidence: tuple[str, ...] = ()
    """What the chat templates of its models have, if not ``start`` and ``end``."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Its texts that may be tokens of their own."""
        return tuple(mark for mark in (self.start, self.end, *self.content) if mark)


THINK = ReasoningFormat("<think>", "</think>")
HARMONY_REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    content=("<|channel|>final<|message|>", ""),
    special=True,
    channels=True,
    evidence=("<|channel|>analysis<|message|>",),
)
REASONING_FORMATS = {
    "openai_gptoss": HARMONY_REASONING,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", special=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special=True),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"), special=True
    ),
    "solar_open": ReasoningFormat(
        "<|think|>",
        "<|end|><|begin|>assistant",
        content=("<|content|>", "<|end|><|begin|>assistant"),
        special=True,
        between=True,
        evidence=("<|begin|>assistant", "<|think|>", "<|content|>"),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", special=True, calls="<|tools_prefix|>"),
    "hy_v3": ReasoningFormat(
        "<think:opensource>", "</think:opensource>", special=True, evidence=("<think", ":opensource")
    ),
    "hunyuan_a13b": THINK._replace(content=("<answer>", "</answer>"), evidence=("<think>", "<|extra_0|>")),
    "ernie45": THINK._replace(
        content=("<response>", "</response>"), evidence=("<think>", "<response>", "<global_setting>")
    ),
    "granite": THINK._replace(
        content=("<response>", "</response>"), evidence=("<think></think>", "<response></response>")
    ),
    "qwen3": THINK,
    "glm45": THINK,
    "olmo3": THINK,
    "minimax_m2": THINK._replace(always=True),
    "deepseek_r1": THINK._replace(always=True),
    "deepseek_v3": THINK,
    "kimi_k2": THINK,
    "mimo": THINK,
}
"""By vLLM's names of them, the most particular first."""


def reasoning_format_of(chat_template: str) -> ReasoningFormat | None:
    """The first reasoning format that the chat template shows."""
    rows = REASONING_FORMATS.values()
    return next((row for row in rows if all(text in chat_template for text in row.evidence or row.marks[:2])), None)


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
        self._place: Place = "begin"
        if opened is False:
            self._after_thought()
        self._nothing_yet = True
        """Of the reasoning, or of content between marks."""
        self._text = ""
        """Text of undecided meaning."""

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that more text decides."""
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
            self._pause(at_end)
        said = self._unwrapped(at_end) if self._place == "wrapped" else ""
        if self._place == "unwrapped":
            self._text = self._text.lstrip()
            self._place = "content" if self._text else "unwrapped"
        said += self._take(len(self._text)) if self._place == "content" else ""
        return joined([Reasoning(thought), Content(said)])

    def _begin(self, at_end: bool) -> None:
        said, start = behind_space(self._text), self._row.start
        if said is not None and said.startswith(start):
            self._text = said[len(start) :]
            self._place = "thought"
        elif at_end or said is None or not start.startswith(said):
            if self._thinks:
                self._place = "thought"
            else:
                self._after_thought()

    def _after_thought(self) -> None:
        """Content that follows no end mark keeps its whitespace, but for that around marks."""
        self._place = "pause" if self._row.content[0] else "content"

    def _think(self, at_end: bool) -> str:
        return self._up_to(self._row.end, "pause", at_end, self._row.calls)

    def _pause(self, at_end: bool) -> None:
        """Between reasoning and content."""
        self._text = self._text.lstrip()
        start, end = self._row.content
        if start and self._text.startswith(start):
            self._text = self._text[len(start) :]
            self._place, self._nothing_yet = "wrapped", True
        elif self._text and (at_end or not start.startswith(self._text)):
            self._place = "wrapped" if end else "content"

    def _unwrapped(self, at_end: bool) -> str:
        """Content up to the mark that ends it; what follows is content as well."""
        return self._up_to(self._row.content[1], "unwrapped", at_end)

    def _up_to(self, mark: str, then: Place, at_end: bool, calls: str = "") -> str:
        """The text in front of a mark, less the space beside it; behind the mark the place is ``then``. What begins
        with ``calls`` before it is content."""
        if self._nothing_yet:
            self._text = self._text.lstrip()
        text, found, rest = self._text.partition(mark)
        if calls and calls in text:
            text = text[: text.index(calls)]
            self._place, self._text = "content", self._text[len(text) :]
            return without_space(text)
        if found:
            self._place, self._text = then, rest
            return without_space(text)
        settled = len(self._text)
        if not at_end:
            settled = min(len(before(self._text, awaited)) for awaited in (mark, calls) if awaited)
        self._nothing_yet = self._nothing_yet and not settled
        return self._take(settled)

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken
