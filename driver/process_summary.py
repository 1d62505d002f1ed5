"""The third stage: from token ids to the text a client sees."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from driver.bounded_queue import BoundedQueue, QueueClosed
from driver.errors import InvalidRequest
from driver.messages import Ended, Finished, Landed, Opened, Summary
from driver.open_requests import OpenRequest, OpenRequests
from driver.request import ReturnSample, Usage
from driver.sample_logprobs import SampleLogprobs
from driver.sample_text import SampleText
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
        """By sequence."""

    def run(self) -> None:
        """Delivers until ``summaries`` is closed."""
        with suppress(QueueClosed):
            while True:
                self._handle(self._summaries.get())

    def _handle(self, summary: Summary) -> None:
        match summary:
            case Opened():
                self._open(summary)
            case Landed(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case Ended(sequence_id=sequence_id, finish_reason=finish_reason):
                self._deliver(SequenceOutput(sequence_id, [], finish_reason))

    def _open(self, opened: Opened) -> None:
        usage = _OpenUsage(opened.num_prompt_tokens, opened.request.num_samples)
        for index, sequence_id in enumerate(opened.request.sequence_ids):
            self._replies[sequence_id] = _Reply(index, opened, usage, self._tokenizer)
        for output in opened.resumed:
            if output.token_ids:
                self._resume(self._replies[output.request_id], output)

    def _resume(self, reply: "_Reply", output: SequenceOutput) -> None:
        """Read again what the client has; all there is to say of it is whether it was the end."""
        sample = reply.sample(output)
        if sample.finish_reason is not None:
            end = ReturnSample(
                request_id=sample.request_id,
                index=sample.index,
                finish_reason=sample.finish_reason,
                usage=sample.usage,
            )
            self._put(reply, output, end)

    def _deliver(self, output: SequenceOutput) -> None:
        reply = self._replies.get(output.request_id)
        if reply is None:
            return
        if output.error is not None:
            self._fail(reply.opened.request, output)
            return
        self._put(reply, output, reply.sample(output))

    def _put(self, reply: "_Reply", output: SequenceOutput, sample: ReturnSample) -> None:
        if sample.finish_reason is not None:
            del self._replies[output.request_id]
            if output.finish_reason is None:
                # Before the client hears of it: its next request then comes after this in the inbox.
                self._post(Finished(output.request_id))
        if sample.is_last:
            self._open_requests.close(reply.opened.request, sample)
        else:
            reply.opened.request.request.channel.put(sample)

    def _fail(self, request: OpenRequest, output: SequenceOutput) -> None:
        """End a request, of which one sample has come to an error; the engine is told to let go of the others."""
        for sequence_id in request.sequence_ids:
            if self._replies.pop(sequence_id, None) is not None and sequence_id != output.request_id:
                self._post(Finished(sequence_id))
        self._open_requests.fail(request, InvalidRequest(output.error or ""))


@dataclass
class _OpenUsage:
    """What a request has cost so far, and how many of its samples have not ended."""

    prompt_tokens: int
    num_open: int
    completion_tokens: int = 0


class _Reply:
    """What one client has been told so far of one sample."""

    def __init__(self, index: int, opened: Opened, usage: _OpenUsage, tokenizer: Tokenizer) -> None:
        self.opened = opened
        self._index = index
        self._usage = usage
        self._words = SampleText(opened, tokenizer)
        self._logprobs = SampleLogprobs(index, opened.params, tokenizer)

    def sample(self, output: SequenceOutput) -> ReturnSample:
        """What this output adds; the sample's last if it ends the sequence or what it says ends it."""
        text, num_read, finish_reason = self._words.read(output)
        self._usage.completion_tokens += num_read
        self._usage.num_open -= finish_reason is not None
        return ReturnSample(
            request_id=self.opened.request.request_id,
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_read],
            logprobs=self._logprobs.of_output(output.logprobs[:num_read]),
            prompt_logprobs=self._logprobs.of_prompt(output.prompt_logprobs),
            finish_reason=finish_reason,
            usage=None if self._usage.num_open else Usage(self._usage.prompt_tokens, self._usage.completion_tokens),
        )
