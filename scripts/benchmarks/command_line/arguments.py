"""The arguments of `scripts/bench`."""

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.command_line.measurements import COMMANDS
from scripts.benchmarks.compiled.tpu import TOKENS
from scripts.benchmarks.endurance import soak
from scripts.benchmarks.endurance.fuzz import FRAMES, REQUESTS
from scripts.benchmarks.figures.plot import plot
from scripts.benchmarks.hostile.measure import SECONDS
from scripts.benchmarks.models import SIZES, models_directory
from scripts.benchmarks.peers.systems import PEERS
from scripts.benchmarks.simulation import simulate
from scripts.benchmarks.simulation.policy_plot import plot_policies
from scripts.benchmarks.speculation.measure import DRAFT_MODEL, NGRAM

OWN_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "chaos": {
        "--minutes": {"type": float, "default": 3, "metavar": "F", "help": "how long, at least (default: 3)"},
        "--seed": {"type": int, "default": 0, "metavar": "N", "help": "draws the points to kill at (default: 0)"},
    },
    "fuzz": {
        "--frames": {"type": int, "default": FRAMES, "metavar": "N", "help": f"how many (default: {FRAMES:,})"},
        "--requests": {
            "type": int,
            "default": REQUESTS,
            "metavar": "N",
            "help": f"generated ones (default: {REQUESTS:,})",
        },
        "--seed": {"type": int, "default": 0, "metavar": "N", "help": "draws them (default: 0)"},
    },
    "hostile": {
        "--seconds": {
            "type": float,
            "default": SECONDS,
            "metavar": "F",
            "help": f"of each attack (default: {SECONDS:g})",
        },
        "--only": {"default": "", "metavar": "TEXT", "help": "attacks with this in their names (default: all)"},
    },
    "tpu": {
        "--tokens": {
            "type": int,
            "default": TOKENS,
            "metavar": "N",
            "help": f"that each sequence holds (default: {TOKENS:,})",
        },
    },
    "speculation": {
        "--model": {"choices": ("small", "demo"), "help": "small, with a language, or demo (default: both)"},
        "--config": {
            "metavar": "JSON",
            "help": f"of the daemon that drafts (default: {NGRAM}, and for demo {DRAFT_MODEL}, too)",
        },
        "--llama-lookup": {"metavar": "PROGRAM", "help": "measure llama.cpp's own lookup beside small's"},
    },
}
"""Of commands that have no others, but those of all."""
TOTALS = {"simulate": simulate.REQUESTS, "soak": soak.REQUESTS}
"""Requests, by command."""
EPILOG = f"""
models: {", ".join(SIZES)}, with random weights of seed 0, made when first needed in
{models_directory()}; or any Hugging Face directory.

--vs runs the same prompts through others, in turns with ours, on the same checkpoint in float32:
transformers' generate and its continuous batching, llama.cpp's server, and vLLM's. Each needs a
program, which is set up apart from oDriver:
    python3 -m venv torch-env
    torch-env/bin/pip install transformers torch      (PyTorch's site tells how to get its CPU build)
    vllm-env with vLLM's build for CPUs               (its site tells how)
    llama-server, built for this machine; .venv/bin/pip install -e ".[bench]" has what writes its files
    scripts/bench serve --vs transformers=torch-env/bin/python --vs vllm=vllm-env/bin/vllm \\
        --vs llama.cpp=build/bin/llama-server

Figures are medians of --repeat runs. Run nothing else meanwhile: two cores are shared fast.
"""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what it needs found to be there before anything is measured."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.repeat < 1:
        command_line.error(f"--repeat must be at least 1, not {options.repeat}")
    if options.plot is not None and not importlib.util.find_spec("matplotlib"):
        command_line.error('a plot needs matplotlib: pip install -e ".[bench]"')
    options.vs = dict(_peer(command_line, given) for given in options.vs)
    lookup = getattr(options, "llama_lookup", None)
    if lookup is not None:
        if shutil.which(lookup) is None:
            command_line.error(f"--llama-lookup must be llama.cpp's program, not {lookup!r}")
        if options.model == "demo":
            command_line.error("--llama-lookup is measured beside small, not beside demo")
        _check_gguf(command_line)
    return options


def _peer(command_line: argparse.ArgumentParser, given: str) -> tuple[str, str]:
    """A system of PEERS, and its program."""
    name, _, program = given.partition("=")
    if name not in PEERS or shutil.which(program) is None:
        command_line.error(f"--vs must be one of {', '.join(PEERS)}, =, and its program, not {given!r}: see --help")
    if name == "llama.cpp":
        _check_gguf(command_line)
    return name, program


def _check_gguf(command_line: argparse.ArgumentParser) -> None:
    if not importlib.util.find_spec("gguf"):
        command_line.error('llama.cpp\'s files need gguf: pip install -e ".[bench]"')


def parser() -> argparse.ArgumentParser:
    """The command line, every subcommand included."""
    command_line = argparse.ArgumentParser(
        "scripts/bench",
        description="Measure oDriver on this machine, beside the machine's limits and beside others.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(required=True, metavar="COMMAND")
    for name, measure, what in COMMANDS:
        command = commands.add_parser(
            name, help=what, description=what, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(
            measure=measure,
            models={"all": list(SIZES), "speculation": ["small", "demo"]}.get(name, ["small"]),
            vs=[],
            draw=plot_policies if name == "simulate" else plot,
        )
        _add_arguments(command, name)
    return command_line


def _add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    add = command.add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    picture = Path("bench.png") if name == "all" else None
    add("--plot", type=Path, default=picture, metavar="FILE", help=f"write a PNG there (default: {picture})")
    add("--repeat", type=int, default=3, metavar="N", help="runs of each measurement (default: 3)")
    if name in TOTALS:
        add("--requests", type=int, default=TOTALS[name], metavar="N", help=f"in all (default: {TOTALS[name]:,})")
    if name in OWN_ARGUMENTS:
        for flag, described in OWN_ARGUMENTS[name].items():
            add(flag, **described)
        return
    if name in ("host", "lora", "sampling", "simulate", "soak"):
        return
    if name in ("fairness", "experts"):
        add("--settings", default="", metavar="S", help='flags for the daemon: --settings="--run-ahead 0"')
        return
    model = " and ".join(SIZES) if name == "all" else "small"
    add("--model", default=None, metavar="M", help=f"tiny, small or a directory (default: {model})")
    if name in ("all", "serve", "prefill"):
        peers = f"measure one of {', '.join(PEERS)} beside ours, in turns; may be given again"
        add("--vs", action="append", default=[], metavar="NAME=PROGRAM", help=peers)
    if name in ("all", "serve", "prefill", "random", "gateway", "grammar", "startup", "arrivals"):
        add("--settings", default="", metavar="S", help='flags for the daemon: --settings="--run-ahead 0"')
