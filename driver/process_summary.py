"""The third stage: from token ids to the text a client sees."""

from collections.abc import Callable
from contextlib import suppress

from driver.bounded_queue import BoundedQueue, QueueClosed
from driver.detokenizer import Detokenizer
from driver.errors import InvalidRequest
from driver.messages import Aborted, Finished, Landed, Opened, Summary
from driver.open_requests import OpenRequests
from driver.request import ReturnSample, Usage
from driver.stop_strings import StopStrings
from driver.tokenizer import Tokenizer
from engine.sequence import SequenceOutput


class ProcessSummary:
    """Detokenises, looks for stop strings, counts and delivers. Its thread alone knows the text of a request.

    A sequence is known from Opened to its last sample; outputs that come later are a step's run-ahead, and dropped.
    ``post`` puts a Finished where the execution thread finds it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        open_requests: OpenRequests,
        summaries: BoundedQueue[Summary],
        post: Callable[[Finished], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._open_requests = open_requests
        self._summaries = summaries
        self._post = post
        self._replies: dict[str, _Reply] = {}

    def run(self) -> None:
        """Delivers until ``summaries`` is closed."""
        with suppress(QueueClosed):
            while True:
                self._handle(self._summaries.get())

    def _handle(self, summary: Summary) -> None:
        match summary:
            case Opened(request=request):
                self._replies[request.sequence_id] = _Reply(summary, self._tokenizer)
            case Landed(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case Aborted(sequence_id=sequence_id):
                self._deliver(SequenceOutput(sequence_id, [], finish_reason="abort"))

    def _deliver(self, output: SequenceOutput) -> None:
        reply = self._replies.get(output.request_id)
        if reply is None:
            return
        if output.error is not None:
            del self._replies[output.request_id]
            self._open_requests.fail(reply.opened.request, InvalidRequest(output.error))
            return
        sample = reply.sample(output)
        if not sample.is_last:
            reply.opened.request.request.channel.put(sample)
            return
        del self._replies[output.request_id]
        if output.finish_reason is None:
            # Before the client hears of it: its next request then comes after this in the inbox.
            self._post(Finished(output.request_id))
        self._open_requests.close(reply.opened.request, sample)


class _Reply:
    """What one client has been told so far."""

    def __init__(self, opened: Opened, tokenizer: Tokenizer) -> None:
        self.opened = opened
        self._detokenizer = Detokenizer(tokenizer, opened.prompt_tail)
        self._stops = StopStrings(opened.stops)
        self._num_tokens = 0

    def sample(self, output: SequenceOutput) -> ReturnSample:
        """What this output adds; the last sample if it ends the sequence or completes a stop string."""
        text, num_read = self._read(output)
        self._num_tokens += num_read
        finish_reason = "stop" if self._stops.matched else output.finish_reason
        return ReturnSample(
            request_id=self.opened.request.request_id,
            text=text,
            token_ids=output.token_ids[:num_read],
            finish_reason=finish_reason,
            usage=Usage(self.opened.num_prompt_tokens, self._num_tokens) if finish_reason else None,
        )

    def _read(self, output: SequenceOutput) -> tuple[str, int]:
        """The text to show and the tokens it took, up to the one that completes a stop string.

        A token that ends the sequence with "stop" is a word to us, not to the reader: it counts, but is not shown.
        """
        shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        text = ""
        for num_read, token_id in enumerate(shown, start=1):
            text += self._stops.add(self._detokenizer.add([token_id]))
            if self._stops.matched:
                return text, num_read
        if output.finish_reason is not None:
            text += self._stops.add(self._detokenizer.flush()) + self._stops.flush()
        return text, len(output.token_ids)
