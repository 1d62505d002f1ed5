"""lm-eval: a task of a few lines through ``local-completions``, and the same log-likelihoods by transformers."""

import json
import subprocess
import tempfile
from pathlib import Path

from engine.hub.names import DEMO_MODEL
from scripts.gateway_checks.program import CheckFailed, Program

LM_EVAL = Program("lm_eval", "lm_eval[api]==0.4.13", "transformers>=5,<6")
TASK = Path(__file__).parent / "lm_eval"
ORACLE = Path(__file__).parent / "torch_likelihoods.py"
TOLERANCE = 1e-3
"""Nats, of a whole continuation: both compute in float32, and sum in another order."""


def check(url: str, torch_python: str) -> None:
    """Compare every choice of every line; prints the largest difference, and raises CheckFailed."""
    arguments = {
        "model": "demo",
        "base_url": f"{url}/v1/completions",
        "tokenizer": DEMO_MODEL,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 4,
        "max_length": 1024,
    }
    with tempfile.TemporaryDirectory() as directory:
        LM_EVAL.run(
            *("run", "--model", "local-completions", "--tasks", "odriver_stories", "--log_samples"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--include_path", str(TASK), "--output_path", directory, "--batch_size", "4"),
            within=TASK,
            environment={"HF_HUB_OFFLINE": "1", "HF_HOME": directory, "OPENAI_API_KEY": "none"},
        )
        (samples,) = Path(directory).rglob("samples_*.jsonl")
        told = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    compare(told, torch_python)


def compare(samples: list[dict[str, object]], torch_python: str) -> None:
    """Those of lm-eval with transformers'."""
    pairs, ours = [], []
    for sample in samples:
        asked, answered = sample["arguments"], sample["filtered_resps"]
        assert isinstance(asked, dict) and isinstance(answered, list)
        pairs += [[one["arg_0"], one["arg_1"]] for one in asked.values()]
        ours += [(float(likelihood), str(greedy) == "True") for likelihood, greedy in answered]
    told = subprocess.run(
        [torch_python, str(ORACLE), str(DEMO_MODEL)],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [(likelihood, greedy) for likelihood, greedy in json.loads(told.stdout)]
    largest = max(abs(one[0] - other[0]) for one, other in zip(ours, theirs, strict=True))
    print(f"lm-eval: {len(ours)} log-likelihoods, at most {largest:.2g} nats from those of transformers")
    if largest > TOLERANCE or [greedy for _, greedy in ours] != [greedy for _, greedy in theirs]:
        raise CheckFailed(f"not the log-likelihoods of transformers: {list(zip(pairs, ours, theirs, strict=True))}")
