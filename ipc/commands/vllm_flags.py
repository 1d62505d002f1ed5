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
    VLLMFlag("--kv-cache-memory-bytes", "--num-pages N", "counted in pages"),
    VLLMFlag("-tp", "--tensor-parallel-size N"),
    VLLMFlag("-q", "--quantization FORM"),
    VLLMFlag("--speculative-model", "--speculative-config JSON"),
    VLLMFlag("--num-speculative-tokens", "--speculative-config JSON"),
    VLLMFlag("--nnodes", "--num-processes N"),
    VLLMFlag("--node-rank", "--process-id I"),
    VLLMFlag("--master-addr", "--coordinator-address HOST:PORT"),
    VLLMFlag("--master-port", "--coordinator-address HOST:PORT"),
    VLLMFlag("--uvicorn-log-level", "--log-level LEVEL"),
    VLLMFlag("--disable-log-requests", "--log-level warning"),
    VLLMFlag("--no-enable-log-requests", "--log-level warning"),
    VLLMFlag("--disable-uvicorn-access-log", "--log-level warning"),
    VLLMFlag("--enable-log-requests", "--log-level info", "it is the default"),
    VLLMFlag("--shutdown-timeout", "--drain-timeout S"),
    VLLMFlag("--kv-offloading-size", "--host-cache-gib GIB"),
    VLLMFlag("--kv-offloading-backend", "", "it is our own: --host-cache-gib"),
    VLLMFlag("--swap-space", "", "what preempted requests lose comes back from the prefix cache: see --host-cache-gib"),
    VLLMFlag("--cpu-offload-gb", "", "weights stay in the device's memory; for pages there is --host-cache-gib"),
    VLLMFlag("--enforce-eager", "", "every step is compiled; --staged-readiness is ready sooner"),
    VLLMFlag("--compilation-config", "", "every step is compiled; --staged-readiness is ready sooner"),
    VLLMFlag("--enable-chunked-prefill", "", "prompts are always computed in chunks"),
    VLLMFlag("--async-scheduling", "", "the next step is always planned ahead: --run-ahead"),
    VLLMFlag("--scheduling-policy", "", "a request's `priority` always counts"),
    VLLMFlag("--trust-remote-code", "", "no code of a model is ever run"),
    VLLMFlag("--code-revision", "", "no code of a model is ever run"),
    VLLMFlag("--logits-processors", "", "no code of others is ever run"),
    VLLMFlag("--tool-parser-plugin", "", "no code of others is ever run; formats are those of --tool-call-parser"),
    VLLMFlag("--reasoning-parser-plugin", "", "no code of others is ever run; formats are those of --reasoning-parser"),
    VLLMFlag("--load-format", "", "weights are read from safetensors"),
    VLLMFlag("--hf-overrides", "", "change config.json in a copy of the model"),
    VLLMFlag("--rope-scaling", "", "change config.json in a copy of the model"),
    VLLMFlag(
        "--override-generation-config",
        "",
        "write a generation_config.json, and give its directory as --generation-config",
    ),
    VLLMFlag("--default-chat-template-kwargs", "", "a request has chat_template_kwargs"),
    VLLMFlag("--chat-template-content-format", "", "parts of text are one text for every template"),
    VLLMFlag("--download-dir", "", "the variable HF_HOME says where"),
    VLLMFlag("--hf-token", "", "the variable HF_TOKEN has it"),
    VLLMFlag("--enable-auto-tool-choice", "", "it is always on"),
    VLLMFlag("--enable-reasoning", "", "it is always on"),
    VLLMFlag("--enable-prompt-tokens-details", "", "it is always on"),
    VLLMFlag("--enable-sleep-mode", "", "it is always on: `odriver sleep`"),
    VLLMFlag("--enable-server-load-tracking", "", "it is always on"),
    VLLMFlag("--enable-tokenizer-info-endpoint", "", "it is always on"),
    VLLMFlag("--enable-request-id-headers", "", "it is always on"),
    VLLMFlag(
        "--enable-force-include-usage", "", "a stream has its usage where a request says stream_options.include_usage"
    ),
    VLLMFlag("--structured-outputs-config", "", "structured outputs are always on"),
    VLLMFlag("--guided-decoding-backend", "", "structured outputs are always on"),
    VLLMFlag("--pipeline-parallel-size", "", "several devices are --tensor-parallel-size"),
    VLLMFlag("-pp", "", "several devices are --tensor-parallel-size"),
    VLLMFlag("--enable-expert-parallel", "", "experts are split with all else: --tensor-parallel-size"),
    VLLMFlag("--distributed-executor-backend", "", "several hosts are --num-processes"),
    VLLMFlag("--data-parallel-size", "", "start several daemons, and one `odriver gateway` for them"),
    VLLMFlag("-dp", "", "start several daemons, and one `odriver gateway` for them"),
    VLLMFlag("--api-server-count", "", "one gateway serves HTTP; more are `odriver gateway`"),
    VLLMFlag("--disable-frontend-multiprocessing", "", "HTTP is always a process of its own"),
    VLLMFlag("--root-path", "", "a proxy in front has to take its prefix away"),
    VLLMFlag("--uds", "", "HTTP is served over TCP alone; ZeroMQ has --bind"),
    VLLMFlag("--ssl-ca-certs", "", "callers are known by their keys: --api-keys"),
    VLLMFlag("--max-logprobs", "", f"it is {MAX_LOGPROBS}"),
    VLLMFlag("--max-log-len", "", "texts are not logged"),
    VLLMFlag("--disable-log-stats", "", "the log has no statistics; they are at /metrics and in `odriver top`"),
    VLLMFlag("--tokenizer-mode", "", "the tokenizer is always the fast one"),
    VLLMFlag("--limit-mm-per-prompt", "", "models here take text alone"),
    VLLMFlag("--mm-processor-kwargs", "", "models here take text alone"),
    VLLMFlag("--task", "", "models here generate text"),
    VLLMFlag("--runner", "", "models here generate text"),
    VLLMFlag("--convert", "", "models here generate text"),
)
_BY_NAME = {flag.name: flag for flag in VLLM_FLAGS}
OF_CLIENTS = VLLMFlag("--model", "--connect ADDR", "a daemon is chosen by its address")
"""A flag of vLLM's commands that talk to a server."""


QUANTISED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "compressed-tensors", "mxfp4", "fbgemm_fp8")
"""Forms of checkpoints that vLLM's ``--quantization`` names, and that are found in config.json here."""

HALF = ("half", "float16")


def vllm_value_hint(flags: Container[str], value: object) -> str:
    """What to say of a value of vLLM's to one of these flags; "" if nothing."""
    if "--quantization" in flags and value in QUANTISED:
        return f"; a checkpoint that is in {value} says so itself: leave this out"
    if "--dtype" in flags and value in HALF:
        return "; a checkpoint that is in float16 is widened or rounded as it is loaded: leave this out"
    return ""


def vllm_hint(name: str, ours: Container[str]) -> str:
    """What to say of a flag of vLLM's to a command that has these flags; "" if nothing.

    vLLM takes underscores, ``--no-FLAG`` and ``--FLAG.KEY``, too.
    """
    plain = name.replace("_", "-").partition(".")[0]
    known = _BY_NAME.get(plain) or _BY_NAME.get(plain.replace("--no-", "--", 1))
    for flag in filter(None, (known, OF_CLIENTS if plain == OF_CLIENTS.name else None)):
        if flag.ours.partition(" ")[0] in ours:
            return f"{name} of vLLM is {flag.ours} here" + (f": {flag.words}" if flag.words else "")
        if not flag.ours and "--max-num-seqs" in ours:
            return f"there is no {name} here: {flag.words}"
    return ""
