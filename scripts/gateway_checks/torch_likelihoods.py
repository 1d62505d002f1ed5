"""For a Python that has torch: log-likelihoods of continuations, by transformers and nothing else.

``torch_likelihoods.py MODEL`` reads a JSON list of [text, continuation] and prints one of [nats, whether it is greedy].
"""

import json
import sys

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-untyped]


def main() -> None:
    """Answer stdin on stdout."""
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    told = []
    for text, continuation in json.load(sys.stdin):
        whole = tokenizer(text + continuation, return_tensors="pt").input_ids
        begin = len(tokenizer(text).input_ids)
        with torch.no_grad():
            scores = torch.log_softmax(model(whole).logits[0, begin - 1 : -1], dim=-1)
        own = whole[0, begin:]
        nats = scores.gather(1, own[:, None]).sum().item()
        told.append([nats, bool((scores.argmax(dim=-1) == own).all())])
    print(json.dumps(told))


if __name__ == "__main__":
    main()
