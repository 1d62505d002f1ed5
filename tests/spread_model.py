"""Run by test_tensor_parallel.py, with eight host devices: what a model says on so many of them, as JSON.

spread_model.py MODEL_DIR QUANTIZATION DEVICES...
"""

import json
import sys
from pathlib import Path

from every_third import EveryThird

from engine.build import build_engine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step import step_shapes
from engine.step.inputs import layout

step_shapes.FEW, layout.LEAST_LOGITS = 2, 1  # as a step of four rows has more
REQUESTS = (
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1, seed=1, max_tokens=12, logprobs=20),
    SamplingParams(temperature=1.5, seed=2, top_p=0.8, max_tokens=12),
    SamplingParams(temperature=2, seed=3, top_k=7, min_p=0.01, max_tokens=12),
    SamplingParams(temperature=3, seed=4, top_k=300, max_tokens=12),
    SamplingParams(temperature=0, presence_penalty=1, frequency_penalty=1.5, repetition_penalty=1.2, max_tokens=12),
    SamplingParams(temperature=1, seed=6, logit_bias={3: 5.0, 650: 9.0}, min_tokens=8, max_tokens=12),
    SamplingParams(temperature=0, allowed_token_ids=[5, 130, 257, 600, 699], max_tokens=12),
)


def answers(devices: int) -> list[dict]:
    """Every request's tokens and log-probabilities, all served at once."""
    config = EngineConfig(
        model=Path(sys.argv[1]), tensor_parallel_size=devices, max_num_seqs=4, max_num_batched_tokens=4, page_size=4,
        max_model_len=40, num_pages=60, staged_readiness=True, quantization=sys.argv[2],
    )  # fmt: skip
    engine = build_engine(config, lambda progress: None)
    sequences = [
        Sequence(str(number), [5 + number, 80, 300, 620, 7, 9], params, frozenset(), 12, seed=params.seed or 0)
        for number, params in enumerate(REQUESTS)
    ]
    masked = SamplingParams(temperature=1, seed=9, max_tokens=12)
    sequences.append(Sequence("masked", [4, 4, 44], masked, frozenset(), 12, seed=9, constraint=EveryThird(700)))
    found = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            for token in [*(output.prompt_logprobs or ()), *(output.logprobs or ())]:
                if token is not None:
                    found[output.request_id] += token.logprobs
    return [
        {"params": repr(sequence.params), "tokens": sequence.output_token_ids, "logprobs": found[sequence.request_id]}
        for sequence in sequences
    ]


print(json.dumps({devices: answers(int(devices)) for devices in sys.argv[3:]}))
