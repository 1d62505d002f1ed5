"""The third stage: from token ids to the text a client sees."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from driver.errors import DriverError, InternalError, InvalidRequest
from driver.metrics.request_metrics import RequestMetrics, SampleTimes, timings_of
from driver.open_requests import OpenRequest, OpenRequests
from driver.request import ReturnSample, Usage
from driver.resumption import Resumed
from driver.stages.queues import BoundedQueue, QueueClosed
from driver.stages.stage import Stage
from driver.text.sample_text import SampleLogprobs, SampleText
from driver.text.tokenizer import HuggingFaceTokenizer
from driver.thread_messages import Ended, Finished, Opened, StepOutputs, Summary
from engine.metrics.engine_stats import FIRST_VERSION
from engine.scheduling.sequence import SequenceOutput


class ProcessSummary:
    """Detokenises, looks for stop strings, measures and delivers, all on one thread.

    An exception from one request's output ends that request alone, and the engine ends its
    sequences. Outputs of a sequence after its last sample come from steps that were already
    dispatched, and are dropped. ``post`` puts a Finished into the inbox of the execution thread;
    ``begun`` is called with each request that has its first token.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        open_requests: OpenRequests,
        summaries: BoundedQueue[Summary],
        post: Callable[[Finished], None],
        metrics: RequestMetrics,
        begun: Callable[[OpenRequest], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._open_requests = open_requests
        self._summaries = summaries
        self._post = post
        self._metrics = metrics
        self._begun = begun
        self._replies: dict[str, _Reply] = {}
        """By sequence id."""
        self.stage = Stage("process summary", self._handle, self._fail, _source)

    def run(self) -> None:
        """Delivers until ``summaries`` is closed."""
        with suppress(QueueClosed):
            while True:
                match self._summaries.get():
                    case Opened() as opened:
                        self.stage.work(opened)
                    case StepOutputs(outputs=outputs, weight_version=version):
                        self._read(outputs, version)
                    case Ended(sequence_id=sequence_id, finish_reason=finish_reason):
                        self._read([SequenceOutput(sequence_id, [], finish_reason)])

    def _read(self, outputs: list[SequenceOutput], weight_version: int = 1) -> None:
        now = time.monotonic()
        for output in outputs:
            reply = self._replies.get(output.request_id)
            if reply is not None:
                self.stage.work(_ReplyOutput(reply, output, now, weight_version))

    def _handle(self, item: "Opened | _ReplyOutput") -> None:
        if isinstance(item, Opened):
            self._open(item)
        else:
            self._deliver(item)

    def _open(self, opened: Opened) -> None:
        opened.request.is_counted = True
        usage = _OpenUsage(opened.num_prompt_tokens, opened.request.num_samples)
        texts = {resumed.output.request_id: resumed.text for resumed in opened.resumed}
        for index, sequence_id in enumerate(opened.request.sequence_ids):
            times = SampleTimes(self._metrics, opened, index)
            text = texts.get(sequence_id) or SampleText(opened.params, opened.prompt_tail, self._tokenizer)
            self._replies[sequence_id] = _Reply(index, opened, usage, times, text, self._tokenizer)
        for resumed in opened.resumed:
            self._resume(self._replies[resumed.output.request_id], resumed)

    def _resume(self, reply: "_Reply", resumed: Resumed) -> None:
        """Reads what the client has; delivers the end, if that is one."""
        output = resumed.output
        sample = reply.sample(output, time.monotonic(), resumed.read)
        if sample.finish_reason is not None:
            end = ReturnSample(
                request_id=sample.request_id,
                index=sample.index,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                usage=sample.usage,
            )
            self._put(reply, output, end, time.monotonic())

    def _deliver(self, item: "_ReplyOutput") -> None:
        reply, output, now = item.reply, item.output, item.now
        if output.error is not None:
            kind = InternalError if output.internal else InvalidRequest
            self._end(reply.opened.request, kind(output.error), now, ended=output.request_id)
            return
        request = reply.opened.request
        waits, sample = request.first_token_at is None, reply.sample(output, now, weight_version=item.weight_version)
        if waits and request.first_token_at is not None:
            self._begun(request)
        self._put(reply, output, sample, now)

    def _put(self, reply: "_Reply", output: SequenceOutput, sample: ReturnSample, now: float) -> None:
        if sample.finish_reason is not None:
            del self._replies[output.request_id]
            reply.times.finish(sample.finish_reason, now)
            reply.usage.longest = max(reply.usage.longest, reply.times.num_tokens)
            if output.finish_reason is None:
                # Before the client gets the sample: its next request then comes after this in the
                # inbox.
                self._post(Finished(output.request_id))
        if sample.is_last:
            self._metrics.request_params_n.observe(reply.opened.params.n)
            self._metrics.request_max_num_generation_tokens.observe(reply.usage.longest)
            self._open_requests.close(reply.opened.request, sample)
        else:
            reply.opened.request.request.channel.put(sample)

    def _fail(self, item: "Opened | _ReplyOutput", error: DriverError) -> None:
        self._end(_opened(item).request, error, time.monotonic())

    def _end(self, request: OpenRequest, error: DriverError, now: float, ended: str | None = None) -> None:
        """Ends a request with an error; the engine has ended the sequence ``ended`` already."""
        replies = [self._replies.pop(sequence_id, None) for sequence_id in request.sequence_ids]
        for sequence_id in request.sequence_ids:
            if sequence_id != ended:
                self._post(Finished(sequence_id))
        try:
            for reply in replies:
                if reply is not None:
                    reply.times.finish(None, now)
        finally:
            self._open_requests.fail(request, error)


def _opened(item: "Opened | _ReplyOutput") -> Opened:
    return item if isinstance(item, Opened) else item.reply.opened


def _source(item: "Opened | _ReplyOutput") -> tuple[str, str]:
    return _opened(item).request.source


@dataclass
class _OpenUsage:
    """A request's token counts, and how many of its samples have not ended."""

    prompt_tokens: int
    num_open: int
    completion_tokens: int = 0
    longest: int = 0
    """Tokens of its longest sample that has ended."""


class _Reply:
    """One sample of a request, as its client sees it."""

    def __init__(
        self,
        index: int,
        opened: Opened,
        usage: _OpenUsage,
        times: SampleTimes,
        text: SampleText,
        tokenizer: HuggingFaceTokenizer,
    ) -> None:
        self.opened = opened
        self.times = times
        self._index = index
        self.usage = usage
        self._text = text
        self._num_resumed = 0
        self._version: int | None = FIRST_VERSION
        """Of the weights that made its last token; None if that is resumed, as nobody says it."""
        self._weight_versions: list[tuple[int, int]] = []
        """As in ReturnSample, without that of the start if it made the first tokens."""
        self._logprobs = SampleLogprobs(index, opened.params, tokenizer)

    def sample(
        self,
        output: SequenceOutput,
        now: float,
        read: tuple[str, int, str | None] | None = None,
        weight_version: int = 1,
    ) -> ReturnSample:
        """The text that this output adds; with a finish reason if the sequence or its text ends.

        ``read`` is the result of ``SampleText.read``, if the output is one that the client has.
        """
        text, num_read, finish_reason = read or self._text.read(output)
        begun: list[tuple[int, int]] = []
        if read is not None:
            self._num_resumed, self._version = num_read, None
        elif num_read:
            if weight_version != self._version:
                begun = [(weight_version, self._num_resumed + self.times.num_tokens)]
                self._version, self._weight_versions = weight_version, self._weight_versions + begun
            self.times.add_tokens(num_read, now)
        self.usage.completion_tokens += num_read
        self.usage.num_open -= finish_reason is not None
        return ReturnSample(
            request_id=self.opened.request.request_id,
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_read],
            logprobs=self._logprobs.of_output(output.logprobs[:num_read]),
            prompt_logprobs=self._logprobs.of_prompt(output.prompt_logprobs),
            finish_reason=finish_reason,
            stop_reason=self._text.stop_reason,
            weight_versions=begun if finish_reason is None else self._versions(),
            usage=None if self.usage.num_open else self._cost(),
        )

    def _versions(self) -> list[tuple[int, int]]:
        """As in ReturnSample, at the end."""
        changes = self._weight_versions
        return [(FIRST_VERSION, 0), *changes] if changes and changes[0][1] > self._num_resumed else changes

    def _cost(self) -> Usage:
        """What the request took; its prompt is counted once, as its first sample found it."""
        return Usage(
            self.usage.prompt_tokens,
            self.usage.completion_tokens,
            self.opened.num_cached_tokens(0),
            timings_of(self.opened.request),
        )


class _ReplyOutput(msgspec.Struct, frozen=True):
    """One output, and the reply that it belongs to."""

    reply: _Reply
    output: SequenceOutput
    now: float
    weight_version: int
