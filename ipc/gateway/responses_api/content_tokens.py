"""Which tokens an event's text is of."""

from ipc.gateway.output.output_events import CallBegins, Content, OutputEvent
from ipc.openai.logprob_bodies import TextPlace, text_of
from ipc.wire.completion import TokenLogprobs


class ContentTokens:
    """Keeps tokens with log-probabilities until the event with their text comes. A piece may have tokens of several
    events, and an event those of several pieces."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprobs] = []
        self._rest = ""
        """What the last event left of its last token, before these."""

    def add(self, tokens: list[TokenLogprobs]) -> None:
        """More of the output."""
        self._tokens += tokens

    def take(self, event: OutputEvent) -> list[TokenLogprobs]:
        """Those of the event if it is content, and none otherwise; those before it, such as marks, are of none. An
        event whose text is not that of its tokens has all that there are."""
        if isinstance(event, CallBegins):
            return []
        text = self._rest + text_of(self._tokens)
        start = text.find(event.text)
        stop = len(text) if start < 0 else start + len(event.text)
        taken, behind = [], []
        place = len(self._rest)
        for token, length in zip(self._tokens, TextPlace().pass_tokens(self._tokens), strict=True):
            end = len(self._rest) + length
            if min(place, end - 1) >= stop:  # a token in which no character begins is of the one before
                behind.append(token)
                continue
            place = end
            if end > start:
                taken.append(token)
        self._tokens, self._rest = behind, text[stop:place]
        return taken if isinstance(event, Content) else []
