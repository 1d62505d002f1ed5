"""What others were measured at, through their servers, streaming, on a machine of the kind this is meant for.

Two cores, float32, prompts of 128 tokens and 128 out, greedy, medians. Differences under 20 % are noise, and another
machine is another matter: ``--vs transformers`` measures in the same run instead.
"""

RECORDED: dict[str, dict[str, dict[str, float]]] = {
    "tiny": {
        "decode, 1 at once": {"llama.cpp": 402, "vLLM": 144, "transformers serve": 107},
        "decode, 8 at once": {"llama.cpp": 840, "vLLM": 700, "transformers serve": 476},
        "decode, 32 at once": {"llama.cpp": 1115, "vLLM": 1537, "transformers serve": 547},
        "prefill, 512 tokens": {"llama.cpp": 6754, "vLLM": 12589, "transformers serve": 7536},
        "16 streams": {"llama.cpp": 523, "vLLM": 1037, "transformers serve": 521},
        "16 streams, ITL p50": {"llama.cpp": 22, "vLLM": 13, "transformers serve": 24},
    },
    "small": {
        "decode, 1 at once": {"llama.cpp": 93, "vLLM": 46, "transformers serve": 27, "MaxText": 62, "eSurge": 16},
        "decode, 8 at once": {"llama.cpp": 371, "vLLM": 327, "transformers serve": 98, "MaxText": 109},
        "decode, 32 at once": {"llama.cpp": 433, "vLLM": 629, "transformers serve": 84, "MaxText": 74},
        "prefill, 512 tokens": {
            "llama.cpp": 1422,
            "vLLM": 1863,
            "transformers serve": 1103,
            "MaxText": 1050,
            "eSurge": 467,
        },
        "prefill, 2048 tokens": {"llama.cpp": 892, "vLLM": 1673},
        "16 streams": {"llama.cpp": 245, "vLLM": 426, "transformers serve": 106},
        "16 streams, TTFT p50": {"llama.cpp": 1870, "vLLM": 970, "transformers serve": 1360},
        "16 streams, ITL p50": {"llama.cpp": 51, "vLLM": 30, "transformers serve": 135},
    },
}


def best_recorded(model: str, name: str, more_is_better: bool) -> tuple[str, float] | None:
    """The best peer in a cell, and what it reached; None where nobody was measured."""
    peers = RECORDED.get(model, {}).get(name)
    if not peers:
        return None
    best = (max if more_is_better else min)(peers, key=peers.__getitem__)
    return best, peers[best]
