"""What each command of `scripts/bench` measures, by its options."""

import argparse
import shlex
from collections.abc import Callable, Iterator
from functools import partial

from engine.hub.names import DEMO_MODEL
from scripts.benchmarks.adapters import measure_adapters
from scripts.benchmarks.arrivals import measure_arrivals
from scripts.benchmarks.clients.workload import Prompts
from scripts.benchmarks.compiled.lora import measure_lora
from scripts.benchmarks.compiled.tpu import measure_tpu
from scripts.benchmarks.endurance.chaos import measure_chaos
from scripts.benchmarks.endurance.fuzz import measure_fuzz
from scripts.benchmarks.endurance.random_requests import measure_random
from scripts.benchmarks.endurance.soak import check_histories, measure_soak
from scripts.benchmarks.experts import measure_experts
from scripts.benchmarks.fairness import measure_fairness
from scripts.benchmarks.figures.figure import Figure
from scripts.benchmarks.gateway import gateway_to, measure_gateway
from scripts.benchmarks.grammar import measure_grammar
from scripts.benchmarks.host import measure_host, measure_streams
from scripts.benchmarks.hostile.measure import measure_hostile
from scripts.benchmarks.limits import limit_figures, measure_limits
from scripts.benchmarks.models import model_directory, size_of
from scripts.benchmarks.peers.systems import Ours, serving, two_clients
from scripts.benchmarks.prefill import measure_prefill
from scripts.benchmarks.sampling import measure_sampling
from scripts.benchmarks.serve import measure_serve, measure_status
from scripts.benchmarks.simulation.plan_cost import measure_plan_cost
from scripts.benchmarks.simulation.simulate import measure_policies
from scripts.benchmarks.simulation.simulate_turns import measure_simulated_turns
from scripts.benchmarks.speculation.measure import measure_speculation
from scripts.benchmarks.startup import measure_startup
from scripts.benchmarks.turns import measure_turns

Measure = Callable[[argparse.Namespace], Iterator[Figure]]
TRIES = 3
"""Of each limit, in each turn."""


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
    yield from measure_speculation(_models(options), options.config, options.repeat, options.llama_lookup)


def _prefill(options: argparse.Namespace) -> Iterator[Figure]:
    yield from _with_daemon(options, measure_prefill)


def _with_daemon(options: argparse.Namespace, *measures: Callable[..., Iterator[Figure]]) -> Iterator[Figure]:
    for model in _models(options):
        directory = model_directory(model)
        size = size_of(directory)
        limits, prompts = partial(measure_limits, size, TRIES), Prompts(size.vocabulary)
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


COMMANDS: tuple[tuple[str, Measure, str], ...] = (
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
)
"""Their names, and what they measure, for people."""
