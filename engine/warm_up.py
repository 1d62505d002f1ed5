"""Short requests through an engine before it serves clients."""

from collections.abc import Sequence as ListOf

import numpy as np

from engine.devices.device_errors import DeviceError
from engine.errors import ConfigurationError
from engine.oengine import oEngine
from engine.sampling.token_masks import mask_words
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step.failures import NOT_FINITE


class _AnyToken:
    """A TokenConstraint that forbids nothing."""

    complete = False
    error = None
    expected = ()
    num_forced = 0
    guess_acceptance = 0.0
    expected_masks = ()
    internal = False

    def __init__(self, vocab_size: int) -> None:
        self.mask = np.full(mask_words(vocab_size), -1, np.int32)

    def advance(self, *token_ids: int, guess: ListOf[int] = ()) -> None: ...

    def hear(self, received: set[object]) -> bool:
        del received
        return True

    def fileno(self) -> int:
        raise AssertionError("nobody has to wait for it")

    def suspend(self) -> None: ...

    def close(self) -> None: ...


def warm_up(engine: oEngine) -> None:
    """Run them, so that no client waits for one-time work.

    Raises DeviceError, and ConfigurationError if the model's logits are not finite.
    """
    tokens = min(4, engine.limits.max_model_len)
    prompt = [0] * max(1, tokens - 2)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, logprobs=0),
        SamplingParams(top_k=1, presence_penalty=1, logit_bias={0: 1}, prompt_logprobs=0),
    ):
        any_token = _AnyToken(engine.limits.vocab_size)
        sequence = Sequence(
            "warm-up", prompt, params, frozenset(), tokens - len(prompt), seed=0, salt=None, constraint=any_token
        )
        engine.add(sequence)
        while engine.has_work:
            for output in engine.step():
                _check(output.error)
    engine.start_counting()


def _check(error: str | None) -> None:
    if error is None:
        return
    if error == NOT_FINITE:
        raise ConfigurationError(
            "the model gives NaN or infinity for the first prompt it is tried with: its weights are damaged, or too large "
            "for this dtype"
        )
    raise DeviceError(error)
