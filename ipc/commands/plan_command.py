"""``odriver plan``: what a model would be like on a TPU that is not there."""

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from engine.config import ATTENTION_BACKENDS, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from ipc.commands.arguments import count
from ipc.service.settings import add_setting_arguments

CONFIG_FILE = ("config.json",)
"""What is needed of a model."""
OF_MEMORY = (
    "num_pages", "enable_prefix_caching", "host_cache_gib", "enable_lora", "max_loras", "max_lora_rank", "lora_dtype",
    "lora_target_modules",
)  # fmt: skip
"""Settings whose flags are those of ``serve``, word by word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the topology, and the settings of ``serve`` that a step's shape depends on."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="as for `serve`, or a config.json alone; weights are not needed")
    add(
        "--topology",
        required=True,
        metavar="NAME",
        help="the TPU, as gcloud names it (v6e-1, v5litepod-8, ct6e-standard-8t) or by its topology (v5e:2x4)",
    )
    add(
        "--tp",
        "--tensor-parallel-size",
        type=count,
        dest="tensor_parallel_size",
        metavar="N",
        help="chips to split the model over (default: all that it divides over)",
    )
    add("--max-num-seqs", type=count, metavar="N", help="sequences that run at once (default: 64)")
    add(
        "--max-model-len",
        type=count,
        metavar="N",
        help="tokens of a prompt and its output (default: the model's limit)",
    )
    add("--max-num-batched-tokens", type=count, metavar="N", help="tokens computed in one step (default: 512)")
    add("--page-size", type=count, metavar="N", help="tokens in one page (default: 128)")
    add("--dtype", choices=DTYPES, help="dtype of weights and activations (default: auto, bfloat16)")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="store weights in 8 or 4 bits; w8a8 multiplies in 8 bits too (default: none, or for quantised checkpoints "
        "what they were made for, int8 or w8a8)",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="dtype of keys and values in the cache; int8 is read by xla alone (default: auto, that of activations)",
    )
    add(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        help="kernel of attention (default: auto, of pallas and jax what moves fewest bytes)",
    )
    add("--hbm-utilization", type=float, metavar="F", help="share of the memory that may be used (default: 0.9)")
    add_setting_arguments(parser, OF_MEMORY)
    add(
        "--tokens",
        type=count,
        default=1024,
        metavar="N",
        help="tokens that each sequence holds in the figures (default: 1024)",
    )
    add(
        "--speculative-config",
        metavar="JSON",
        help="the daemon drafts, as with the same flag of `serve` (default: no; the figures are of 4 drafts)",
    )
    add("--staged-readiness", action="store_true", help="compile only what staged readiness waits for")
    add("--json", action="store_true", default=False, help="as JSON instead of tables")


def run(options: dict[str, Any]) -> int:
    """Compile and print the plan. Raises ConfigurationError, also if the model does not fit."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # whatever this machine has is not what is planned for
    # jaxlib logs each program that it cannot parse, with a stack trace.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from engine.config import EngineConfig
    from engine.hub.obtain import with_draft_directory
    from engine.planner.chip_planner import plan_chips
    from ipc.commands.plan_tables import show_plan
    from ipc.process.logs import stderr_console
    from ipc.service.terminal import start_up

    as_json, topology, tokens, model = (options.pop(name) for name in ("json", "topology", "tokens", "model"))
    with start_up(stderr_console()) as shown:
        modules = tuple(options.pop("lora_target_modules", ()))
        config = with_draft_directory(EngineConfig(**options, lora_target_modules=modules), CONFIG_FILE)
        plan = plan_chips(config, _config_file(model), topology, tokens, shown.show)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(plan)).decode())
    else:
        show_plan(plan)
    return 0


def _config_file(model: str) -> Path:
    """The model's config.json, which is downloaded if it is elsewhere."""
    if model.endswith(".json"):
        return Path(model)
    from engine.hub.obtain import small_files

    return small_files(model, patterns=CONFIG_FILE)[0] / "config.json"
