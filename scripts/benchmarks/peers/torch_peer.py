"""transformers on torch, as a child that is asked as ours is; runs in a Python that has them, and imports nothing else.

Both ways use the default attention (sdpa) and stamp each token where it is made. They have a process each,
so that neither meets what the other has left behind: threads, memory, a changed model.
"""

import json
import logging
import os
import sys
import time
import warnings
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

TOKENS_PER_STEP = 512
PAGE_SIZE, PAGES = 16, 4096


class Stamp(StoppingCriteria):
    """Never stops; notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002 - its interface
        """Called after each step."""
        self.times.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Generate:
    """All prompts as one batch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Timelines, in the fields of ipc.benchmark.timeline.Timeline."""
        stamp, began = Stamp(), time.monotonic()
        input_ids = torch.tensor(prompts)
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_greedy(max_tokens),
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
        return [_timeline(prompt, began, stamp.times) for prompt in prompts]

    def close(self) -> None:
        """Nothing is left running."""


class ContinuousBatching:
    """One manager for all that comes, as in ``transformers serve``; its thread sleeps while there is nothing to do."""

    def __init__(self, model: Any) -> None:
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=PAGES, max_batch_tokens=TOKENS_PER_STEP, allow_block_sharing=False
        )
        self._manager = model.init_continuous_batching(_greedy(1), config)
        self._manager.start()

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Timelines, in the fields of ipc.benchmark.timeline.Timeline."""
        began = time.monotonic()
        waited_for = set(self._manager.add_requests(prompts, max_new_tokens=max_tokens, record_timestamps=True))
        timelines = []
        while waited_for:
            result = self._manager.get_result(timeout=1)
            if result is None:
                assert self._manager.is_running(), "the continuous batching thread has died"
            elif result.is_finished():
                waited_for.discard(result.request_id)
                timelines.append(_timeline(result.prompt_ids, began, result.timestamps))
        return timelines

    def close(self) -> None:
        """End the thread, which the process would wait for."""
        self._manager.stop(block=True)


MODES: dict[str, Any] = {"generate": Generate, "continuous batching": ContinuousBatching}


def _greedy(max_tokens: int) -> GenerationConfig:
    """No token ends it: -1 is none."""
    return GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0)


def _timeline(prompt: list[int], began: float, times: list[float]) -> dict[str, Any]:
    return {"prompt_tokens": len(prompt), "sent_at": began, "arrivals": [(at, 1) for at in times]}


def main() -> None:
    """Answer questions, a JSON line each."""
    directory, mode = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever it prints is not an answer
    peer = MODES[mode](AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    for line in sys.stdin:
        print(json.dumps(peer.run(**json.loads(line))), file=answers, flush=True)
    peer.close()


if __name__ == "__main__":
    main()
