"""The command line of `scripts/bench`."""

import argparse
import importlib.util
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.errors import ConfigurationError
from engine.hub.names import DEMO_MODEL
from scripts.benchmarks.adapters import measure_adapters
from scripts.benchmarks.arrivals import measure_arrivals
from scripts.benchmarks.clients.workload import Prompts
from scripts.benchmarks.compiled.lora import measure_lora
from scripts.benchmarks.compiled.tpu import TOKENS, measure_tpu
from scripts.benchmarks.endurance import soak
from scripts.benchmarks.endurance.chaos import ChaosFailed, measure_chaos
from scripts.benchmarks.endurance.fuzz import FRAMES, REQUESTS, FuzzFailed, measure_fuzz
from scripts.benchmarks.endurance.random_requests import measure_random
from scripts.benchmarks.endurance.soak import SoakFailed, check_histories, measure_soak
from scripts.benchmarks.experts import measure_experts
from scripts.benchmarks.fairness import measure_fairness
from scripts.benchmarks.figures.figure import Figure
from scripts.benchmarks.figures.machine import busy, describe_machine
from scripts.benchmarks.figures.plot import plot
from scripts.benchmarks.figures.report import save, show
from scripts.benchmarks.gateway import GatewayLeaks, gateway_to, measure_gateway
from scripts.benchmarks.grammar import measure_grammar
from scripts.benchmarks.host import measure_host, measure_streams
from scripts.benchmarks.hostile.measure import SECONDS, HostileFailed, measure_hostile
from scripts.benchmarks.limits import limit_figures, measure_limits
from scripts.benchmarks.models import SIZES, model_directory, models_directory, size_of
from scripts.benchmarks.peers.http_peers import PeerFailed
from scripts.benchmarks.peers.systems import PEERS, Ours, serving, two_clients
from scripts.benchmarks.prefill import measure_prefill
from scripts.benchmarks.processes.child import ChildFailed
from scripts.benchmarks.processes.daemon import DaemonFailed
from scripts.benchmarks.sampling import measure_sampling
from scripts.benchmarks.serve import measure_serve, measure_status
from scripts.benchmarks.simulation import simulate
from scripts.benchmarks.simulation.plan_cost import measure_plan_cost
from scripts.benchmarks.simulation.policy_plot import plot_policies
from scripts.benchmarks.simulation.simulate import measure_policies
from scripts.benchmarks.simulation.simulate_turns import measure_simulated_turns
from scripts.benchmarks.speculation.measure import DRAFT_MODEL, NGRAM, measure_speculation
from scripts.benchmarks.startup import measure_startup
from scripts.benchmarks.turns import measure_turns

WIDTH = 132
"""Columns of a table that goes to a file."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand, or all; the exit code."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if warning := busy():
        console.print(f"warning: {warning}", style="yellow")
    machine, figures = describe_machine(), []
    try:
        for figure in options.measure(options):
            figures.append(figure)
            console.print(f"  {figure.benchmark}: {figure.name}: {figure.value:,.4g} {figure.unit}", highlight=False)
    except HostileFailed as error:
        show(figures, console)
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except (
        ChaosFailed,
        ChildFailed,
        ConfigurationError,
        DaemonFailed,
        FuzzFailed,
        GatewayLeaks,
        PeerFailed,
        SoakFailed,
    ) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    show(figures, console)
    if options.json is not None:
        save(figures, machine, options.json)
    if options.plot is not None:
        options.draw(figures, machine, options.plot)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what it needs found to be there before anything is measured."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.repeat < 1:
        command_line.error(f"--repeat must be at least 1, not {options.repeat}")
    if options.plot is not None and not importlib.util.find_spec("matplotlib"):
        command_line.error('a plot needs matplotlib: pip install -e ".[bench]"')
    options.vs = dict(_peer(command_line, given) for given in options.vs)
    return options


def _peer(command_line: argparse.ArgumentParser, given: str) -> tuple[str, str]:
    """A system of PEERS, and its program."""
    name, _, program = given.partition("=")
    if name not in PEERS or shutil.which(program) is None:
        command_line.error(f"--vs must be one of {', '.join(PEERS)}, =, and its program, not {given!r}: see --help")
    if name == "llama.cpp" and not importlib.util.find_spec("gguf"):
        command_line.error('llama.cpp\'s files need gguf: pip install -e ".[bench]"')
    return name, program


def parser() -> argparse.ArgumentParser:
    """The command line, every subcommand included."""
    command_line = argparse.ArgumentParser(
        "scripts/bench",
        description="Measure oDriver on this machine, beside the machine's limits and beside others.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = command_line.add_subparsers(required=True, metavar="COMMAND")
    for name, measure, what in (
        ("all", _all, "everything, with one table and one plot"),
        ("serve", _serve, "decode at 1, 8 and 32 at once, 16 streams, what streaming costs"),
        ("experts", _experts, "decode of models with experts beside a dense one that reads as many weights a token"),
        (
            "speculation",
            _speculation,
            "drafted tokens on against off, in pairs, at 1 and 8 rows: text that repeats, that does not, and that seems to",
        ),
        ("prefill", _prefill, "how fast a lone prompt of 512 and of 2,048 tokens is read"),
        ("random", _random, "2,000 requests of random lengths and parameters, and what was compiled for them"),
        ("host", _host, "the host's time for a step of a model that is nothing"),
        ("sampling", _sampling, "what each variant of sampling costs a step of 64 rows, beside greedy"),
        ("gateway", _gateway, "what HTTP costs beside our own client, and that who hangs up leaves nothing behind"),
        ("grammar", _grammar, "what one row that follows a schema costs 63 others"),
        ("startup", _startup, "from the process's start to READY, with an empty compilation cache and a full one"),
        ("chaos", _chaos, "daemon, clients and batches killed at random points, and that nobody can tell"),
        (
            "fuzz",
            _fuzz,
            "a million frames that are almost messages, requests of whatever can be said, and that they harm nobody",
        ),
        ("hostile", _hostile, "whatever one client could do to all others, and that nothing of it gets through"),
        ("limits", _limits, "how fast this machine reads memory and multiplies matrices"),
        ("soak", _soak, "10,000 requests on a pool that is too small, with aborts, kills and faults: nothing is lost"),
        ("fairness", _fairness, "what a client's short prompts wait for beside another's flood of long ones"),
        ("arrivals", _arrivals, "what 16 streams feel of 16 prompts that arrive at once, and what these wait for"),
        (
            "turns",
            _turns,
            "conversations that the pool has no room for, with a tier in host memory and without one, here and simulated on a TPU",
        ),
        (
            "simulate",
            _simulate,
            "what the scheduler's policies are worth on a TPU, simulated, and what a step costs the host",
        ),
        ("tpu", _tpu, "what the compiler says of the steps on TPUs, none of which need be there"),
        ("adapters", _adapters, "what eight adapters in its rows cost a step of 32 on this machine"),
        ("lora", _lora, "what the compiler says that adapters cost a step on TPUs, none of which need be there"),
    ):
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


def _all(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _host(options)
    yield from _sampling(options)
    for model in _models(options):
        options.model = model
        yield from _limits(options)
        yield from _with_daemon(options, measure_serve, measure_prefill)
        yield from _random(options)
        yield from _grammar(options)
        yield from _startup(options)


def _serve(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _with_daemon(options, measure_serve)


def _experts(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_experts(shlex.split(options.settings), options.repeat)


def _speculation(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_speculation(_models(options), options.config, options.repeat)


def _prefill(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _with_daemon(options, measure_prefill)


def _with_daemon(options: argparse.Namespace, *measures: Callable[..., Iterator[Figure]]) -> Iterator[Figure]:
    for model in _models(options):
        directory = model_directory(model)
        size = size_of(directory)
        limits, prompts = measure_limits(size), Prompts(size.vocabulary)
        with serving(directory, shlex.split(options.settings), options.vs) as (ours, others):
            for measure in measures:
                yield from measure(model, size, prompts, ours, others, limits, options.repeat)
            yield from measure_status(model, ours)


def _random(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        with serving(model_directory(model), shlex.split(options.settings)) as (ours, _):
            yield from measure_random(model, ours)


def _host(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_host(options.repeat)
    yield from measure_streams(options.repeat)


def _sampling(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_sampling(options.repeat)


def _gateway(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        directory = model_directory(model)
        prompts = Prompts(size_of(directory).vocabulary)
        with gateway_to(directory, shlex.split(options.settings)) as gateway:
            yield from measure_gateway(model, prompts, gateway, options.repeat)


def _grammar(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _by_two_clients(measure_grammar, options)


def _startup(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        yield from measure_startup(model, model_directory(model), shlex.split(options.settings), options.repeat)


def _chaos(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_chaos(60 * options.minutes, seed=options.seed)


def _fuzz(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_fuzz(options.frames, options.requests, options.seed)


def _hostile(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_hostile(options.seconds, options.only)


def _limits(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        size = size_of(model_directory(model))
        yield from limit_figures(measure_limits(size), model, size)


def _fairness(options: argparse.Namespace) -> Iterator[Figure]:
    with two_clients(DEMO_MODEL, shlex.split(options.settings)) as (flooding, other):
        name = options.settings or "as shipped"
        yield from measure_fairness(name, Prompts(size_of(DEMO_MODEL).vocabulary), flooding, other)


def _arrivals(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _by_two_clients(measure_arrivals, options)


def _by_two_clients(
    measure: Callable[[str, Prompts, Ours, Ours, int], Iterator[Figure]], options: argparse.Namespace
) -> Iterator[Figure]:
    """The figures of each model, whose daemon has two clients."""
    for model in _models(options):
        directory = model_directory(model)
        prompts = Prompts(size_of(directory).vocabulary)
        with two_clients(directory, shlex.split(options.settings)) as (one, other):
            yield from measure(model, prompts, one, other, options.repeat)


def _turns(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        yield from measure_turns(model, model_directory(model), options.repeat)
    yield from measure_simulated_turns()


def _soak(options: argparse.Namespace) -> Iterator[Figure]:
    yield from check_histories()
    yield from measure_soak(options.requests)


def _simulate(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_policies(options.requests)
    yield from measure_plan_cost(options.repeat)


def _tpu(options: argparse.Namespace) -> Iterator[Figure]:
    yield from measure_tpu(options.tokens)


def _adapters(options: argparse.Namespace) -> Iterator[Figure]:
    for model in _models(options):
        yield from measure_adapters(model, options.repeat)


def _lora(options: argparse.Namespace) -> Iterator[Figure]:  # noqa: ARG001
    yield from measure_lora()


def _models(options: argparse.Namespace) -> list[str]:
    return [options.model] if options.model else options.models


if __name__ == "__main__":
    sys.exit(main())
