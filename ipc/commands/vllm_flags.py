"""The flags of ``vllm serve`` that have another name here, or none, for people who know vLLM."""

from collections.abc import Container
from typing import NamedTuple

from engine.request_limits import MAX_LOGPROBS


class VLLMFlag(NamedTuple):
    """A flag of vLLM's; ``ours`` is the one that does the same, with its value, "" if there is
    none."""

    name: str
    ours: str
    words: str = ""


VLLM_FLAGS = (
    VLLMFlag("--model", "MODEL", "the model is named without a flag"),
    VLLMFlag("--port", "--http PORT", "without it HTTP is not served"),
    VLLMFlag("--host", "--http HOST:PORT", "without it HTTP is not served"),
    VLLMFlag("--gpu-memory-utilization", "--hbm-utilization F"),
    VLLMFlag("--block-size", "--page-size N"),
    VLLMFlag("--num-gpu-blocks-override", "--num-pages N"),
    VLLMFlag("-tp", "--tensor-parallel-size N"),
    VLLMFlag("--nnodes", "--num-processes N"),
    VLLMFlag("--node-rank", "--process-id I"),
    VLLMFlag("--master-addr", "--coordinator-address HOST:PORT"),
    VLLMFlag("--uvicorn-log-level", "--log-level LEVEL"),
    VLLMFlag("--disable-log-requests", "--log-level warning"),
    VLLMFlag("--enable-log-requests", "--log-level info", "it is the default"),
    VLLMFlag("--kv-offloading-size", "--host-cache-gib GIB"),
    VLLMFlag("--kv-offloading-backend", "", "it is our own: --host-cache-gib"),
    VLLMFlag("--swap-space", "", "what preempted requests lose comes back from the prefix cache: see --host-cache-gib"),
    VLLMFlag("--cpu-offload-gb", "", "weights stay in the device's memory; for pages there is --host-cache-gib"),
    VLLMFlag("--enforce-eager", "", "every step is compiled; --staged-readiness is ready sooner"),
    VLLMFlag("--enable-chunked-prefill", "", "prompts are always computed in chunks"),
    VLLMFlag("--async-scheduling", "", "the next step is always planned ahead: --run-ahead"),
    VLLMFlag("--scheduling-policy", "", "a request's `priority` always counts"),
    VLLMFlag("--trust-remote-code", "", "no code of a model is ever run"),
    VLLMFlag("--load-format", "", "weights are read from safetensors"),
    VLLMFlag("--download-dir", "", "the variable HF_HOME says where"),
    VLLMFlag("--hf-token", "", "the variable HF_TOKEN has it"),
    VLLMFlag("--enable-auto-tool-choice", "", "it is always on"),
    VLLMFlag("--enable-reasoning", "", "it is always on"),
    VLLMFlag("--enable-prompt-tokens-details", "", "it is always on"),
    VLLMFlag("--structured-outputs-config", "", "structured outputs are always on"),
    VLLMFlag("--guided-decoding-backend", "", "structured outputs are always on"),
    VLLMFlag("--pipeline-parallel-size", "", "several devices are --tensor-parallel-size"),
    VLLMFlag("--data-parallel-size", "", "start several daemons, and one `odriver gateway` for them"),
    VLLMFlag("--api-server-count", "", "one gateway serves HTTP; more are `odriver gateway`"),
    VLLMFlag("--max-logprobs", "", f"it is {MAX_LOGPROBS}"),
    VLLMFlag("--tokenizer-mode", "", "the tokenizer is always the fast one"),
    VLLMFlag("--limit-mm-per-prompt", "", "models here take text alone"),
)
_BY_NAME = {flag.name: flag for flag in VLLM_FLAGS}
OF_CLIENTS = VLLMFlag("--model", "--connect ADDR", "a daemon is chosen by its address")
"""A flag of vLLM's commands that talk to a server."""


def vllm_hint(name: str, ours: Container[str]) -> str:
    """What to say of a flag of vLLM's to a command that has these flags; "" if nothing."""
    for flag in filter(None, (_BY_NAME.get(name), OF_CLIENTS if name == OF_CLIENTS.name else None)):
        if flag.ours.partition(" ")[0] in ours:
            return f"{name} of vLLM is {flag.ours} here" + (f": {flag.words}" if flag.words else "")
        if not flag.ours and "--max-num-seqs" in ours:
            return f"there is no {name} here: {flag.words}"
    return ""
