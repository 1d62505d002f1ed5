"""Adapters in the engine against PEFT on torch: alone and mixed, with fewer slots than adapters, loaded and removed meanwhile."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from adapter_engines import FLOAT32, MAX_MODEL_LEN, Answers, FewPrograms, adapter_engines, request
from adapter_files import ADAPTERS
from jax.errors import JaxRuntimeError
from tpu_twins import PallasTwin

from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS
from engine.adapters.adapter import AdapterError
from engine.hosts.follower import execute_commands
from engine.hosts.other_processes import OtherProcesses
from engine.step.backend_choice import tpu_backend, xla_backend
from engine.step.commands import Leave, decode_command, encode
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import StepExecutor
from engine.step.forward_programs import ADAPTED_FORWARD, ADAPTED_PROMPT_LOGPROBS, PROMPT_LOGPROBS, TAKE_HIDDEN
from engine.step.runner import eSurgeRunner

OPERATIONS, SHARES = ("step", "ask", "load", "abort", "fail"), (0.7, 0.17, 0.1, 0.029, 0.001)
MOST_WAITING = 100
SEEDS = 5
"""Of as many runs, which take minutes each."""
XLA = xla_backend(FLOAT32)
OF_LATENTS = xla_backend(FLOAT32, latents=True)
TPU = replace(tpu_backend(CHIPS["TPU v5 lite"], PALLAS), attention=PallasTwin())
OTHER_BACKENDS = {
    "XLA-2": (XLA, 2, ("mixtral",)),
    "TPU": (TPU, 1, ("phi3",)),
    "TPU-2": (TPU, 2, ("llama2",)),
}
"""By its name: the backend, devices, and the variants with which thorough runs try it; those of all others are exhaustive."""

SHOWN_BY_OTHERS = ("gemma2", "qwen3_5", "qwen3_moe")
"""Variants of whose kernels other variants have all: exhaustive on the CPU's as well."""


def backends():
    """Each variant on the CPU's kernels, and on every other backend."""
    yield pytest.param(("llama2", None, 1), id="llama2")
    for variant in ADAPTERS:
        if variant != "llama2":
            mark = pytest.mark.exhaustive if variant in SHOWN_BY_OTHERS else pytest.mark.thorough
            yield pytest.param((variant, None, 1), id=f"{variant}-kernels", marks=mark)
        for name, (backend, devices, some) in OTHER_BACKENDS.items():
            if variant != "deepseek_v3" or backend is XLA:
                mark = pytest.mark.thorough if variant in some else pytest.mark.exhaustive
                yield pytest.param((variant, backend, devices), id=f"{variant}-{name}", marks=mark)


@pytest.fixture(scope="module", params=[*backends()])
def compiled(request, tmp_path_factory):
    """Two slots for a variant's adapters."""
    variant, backend, devices = request.param
    if variant == "deepseek_v3" and backend is XLA:
        backend = OF_LATENTS
    place = tmp_path_factory.mktemp("adapters")
    return adapter_engines(place, variant, backend=backend, devices=devices)


def load_all(engine, compiled):
    """Adapters by name; 0 is none."""
    return {"": 0} | {name: add(engine, directory) for name, directory in compiled.directories.items()}


def add(engine, directory):
    """The uid of an adapter that is read from a directory."""
    adapter = engine.read_adapter(str(directory))
    engine.send_adapter(adapter)
    engine.add_adapter(adapter)
    return adapter.uid


def refuse_steps(compiled, monkeypatch, faults):
    """The device refuses the steps with adapters of these numbers, counted from the next one."""
    executable = type(compiled.manager).executable

    def refuse(*_):
        raise JaxRuntimeError("INTERNAL: a wire has come loose")

    def faulty(manager, name, size):
        if name == ADAPTED_FORWARD:
            faults[:] = [number - 1 for number in faults if number]
        return refuse if name == ADAPTED_FORWARD and 0 in faults else executable(manager, name, size)

    monkeypatch.setattr(type(compiled.manager), "executable", faulty)


@pytest.mark.parametrize("run_ahead", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_all_adapters_and_the_model_alone_in_one_batch_give_what_torch_gives(compiled, run_ahead):
    """More adapters than slots: rows of two adapters and of none are in one step, and the others wait their turn."""
    engine = compiled.engine(run_ahead=run_ahead)
    engine.start_counting()
    uids = load_all(engine, compiled)
    for number, case in enumerate(compiled.cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers = Answers().run(engine)

    for number, case in enumerate(compiled.cases):
        answers.assert_golden(str(number), case, compiled.tolerance)
    assert engine.stats().adapter_loads >= len(compiled.directories)
    assert engine.stats().compilations_after_ready == 0


def test_adapters_come_and_go_while_requests_run_and_are_preempted(compiled):
    """Each is loaded again and again as another, and removed while its request runs, with memory for little more than one."""
    groups, cases = compiled.manager.shapes.groups, [*compiled.cases, *compiled.cases]
    engine, answers = compiled.engine(num_pages=groups.pages_of(MAX_MODEL_LEN) + 3), Answers()
    for number, case in enumerate(cases):
        uid = add(engine, compiled.directories[case["adapter"]]) if case["adapter"] else 0
        engine.add(request(str(number), case, uid))
        for _ in range(3):
            answers.take(engine.step())
        if uid:
            engine.remove_adapter(uid)

    answers.run(engine)

    for number, case in enumerate(cases):
        answers.assert_golden(str(number), case, compiled.tolerance)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert not engine._scheduler.adapters._known and not stats.adapters_running and not stats.adapters_waiting
    assert not engine._runner._executor._adapters, "a removed adapter is still in host memory"


def test_what_failed_steps_lose_is_written_again(compiled, monkeypatch):
    """A step that the device refuses ends its own requests; the others get their own adapters' tokens from new slots."""
    faults = [5, 11]
    refuse_steps(compiled, monkeypatch, faults)
    engine, answers = compiled.engine(), Answers()
    cases = [*compiled.cases, *compiled.cases]  # more than two steps have
    uids = load_all(engine, compiled)
    for number, case in enumerate(cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers.run(engine)

    assert 0 < len(answers.errors) < len(cases) and engine.stats().failed_steps == 2
    for number, case in enumerate(cases):
        if str(number) not in answers.errors:
            answers.assert_golden(str(number), case, compiled.tolerance)


class WithPrompts(FewPrograms):
    """Computes the log-probabilities of prompts, too."""

    def programs(self, layout):
        """See FewPrograms."""
        names = (TAKE_HIDDEN, PROMPT_LOGPROBS, ADAPTED_PROMPT_LOGPROBS)
        more = [program for program in ExecutionManager.programs(self, layout) if program.name in names]
        return super().programs(layout) + more


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "devices"), [(None, 1), (XLA, 2)], ids=["kernels", "XLA-2"])
def test_log_probabilities_of_prompts_are_those_of_the_heads_adapters(tmp_path, backend, devices):
    """A prompt of a golden's prompt and tokens has the golden's numbers, in steps of several requests."""
    compiled = adapter_engines(tmp_path, "gemma2", backend=backend, devices=devices, manager=WithPrompts, max_loras=4)
    engine, found = compiled.engine(), {}
    uids = load_all(engine, compiled)
    for number, case in enumerate(compiled.cases):
        whole = case | {"prompt": case["prompt"] + case["tokens"]}
        engine.add(request(str(number), whole, uids[case["adapter"]], tokens=1, prompt_logprobs=0))

    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.prompt_logprobs or ())

    for number, case in enumerate(compiled.cases):
        got = [one.logprobs[0] for one in found[str(number)][-len(case["tokens"]) :]]
        np.testing.assert_allclose(got, case["logprobs"], atol=compiled.tolerance)


def test_a_request_whose_adapter_was_never_loaded_is_refused(compiled):
    """It is never served by the model alone."""
    engine = compiled.engine()

    with pytest.raises(AdapterError, match="not loaded any more"):
        engine.add(request("0", compiled.cases[0], 7))


def test_another_process_gets_the_same_tokens_from_the_commands_alone(compiled):
    """It has no files: adapters come to it as they are written to slots, and go when nobody has them any more."""
    frames = []
    follower = StepExecutor(compiled.manager, 0)
    others = OtherProcesses(
        lambda command: frames.append(encode(command)),
        send_adapter=lambda adapter: follower.add_adapter(adapter.uid, adapter.arrays),
    )
    engine = compiled.engine(runner=eSurgeRunner(compiled.manager, 0, others))
    uids = load_all(engine, compiled)
    for number, case in enumerate(compiled.cases[::3]):
        engine.add(request(str(number), case, uids[case["adapter"]]))
    answers = Answers().run(engine)
    for uid in filter(None, uids.values()):
        engine.remove_adapter(uid)

    heard = iter([*frames, encode(Leave(0, "the end"))])
    execute_commands(follower, lambda: decode_command(next(heard)))  # raises HostsError at another token

    assert len(answers.tokens) == len(uids) and not follower._adapters


@pytest.mark.exhaustive
def test_64_adapters_of_ranks_8_to_64_in_8_slots_give_each_request_what_torch_gives(tmp_path):
    """Requests with any of them come at random, with memory for little more than one, and adapters are removed and read again meanwhile."""
    compiled = adapter_engines(tmp_path, "many", max_loras=8, max_lora_rank=64)
    pages = compiled.manager.shapes.groups.pages_of(MAX_MODEL_LEN)
    rng, engine, answers, asked = np.random.default_rng(3), compiled.engine(num_pages=pages + 5), Answers(), []
    uids = load_all(engine, compiled)
    for number in range(512):
        case = compiled.cases[int(rng.integers(len(compiled.cases)))]
        name = case["adapter"]
        engine.add(request(str(number), case, uids[name]))
        asked.append(case)
        for _ in range(int(rng.integers(8))):
            answers.take(engine.step())
        if name and rng.random() < 0.2:
            engine.remove_adapter(uids[name])
            uids[name] = add(engine, compiled.directories[name])

    answers.run(engine)

    for number, case in enumerate(asked):
        answers.assert_golden(str(number), case, compiled.tolerance)
    stats = engine.stats()
    assert stats.adapter_evictions > 100 and stats.preemptions > 10


@pytest.mark.exhaustive
def test_each_of_64_adapters_alone_gives_what_torch_gives(tmp_path):
    """The same requests, one after the other."""
    compiled = adapter_engines(tmp_path, "many", max_loras=1, max_lora_rank=64)
    engine = compiled.engine()
    uids = load_all(engine, compiled)

    for number, case in enumerate(compiled.cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))
        Answers().run(engine).assert_golden(str(number), case, compiled.tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(SEEDS))
def test_in_a_hundred_thousand_operations_no_request_is_served_by_anothers_adapter(tmp_path, monkeypatch, seed):
    """Names get other adapters while requests run, are preempted and aborted, and steps fail; torch has said every token."""
    compiled = adapter_engines(tmp_path, "many", max_loras=6, max_lora_rank=64)
    faults: list[int] = []
    refuse_steps(compiled, monkeypatch, faults)
    pages = compiled.manager.shapes.groups.pages_of(MAX_MODEL_LEN)
    rng, engine, answers = np.random.default_rng(seed), compiled.engine(num_pages=pages + 5), Answers()
    cases = {case["adapter"]: case for case in compiled.cases}
    meanings = {name: name for name in compiled.directories}  # what a name stands for now
    uids, asked, served = load_all(engine, compiled), {}, Counter()
    for number in range(100_000 // SEEDS):
        what = OPERATIONS[int(rng.choice(len(OPERATIONS), p=SHARES))]
        served[what] += 1
        if what == "step" or engine.stats().waiting > MOST_WAITING:
            answers.take(engine.step())
        elif what == "ask":
            name = str(rng.choice(list(uids)))
            case = cases[meanings.get(name, "")]
            asked[str(number)] = case
            engine.add(request(str(number), case, uids[name], tokens=int(rng.integers(1, 21))))
        elif what == "abort" and engine.sequence_ids:
            engine.finish(str(rng.choice(engine.sequence_ids)))
        elif what == "load":
            name = str(rng.choice(list(meanings)))
            meanings[name] = str(rng.choice(list(meanings)))
            engine.remove_adapter(uids[name])
            uids[name] = add(engine, compiled.directories[meanings[name]])
        elif what == "fail":
            faults.append(1)
        if number % 100 == 0:
            engine.check_integrity()

    answers.run(engine)

    for number, case in asked.items():
        tokens = answers.tokens.get(number, [])
        assert tokens == case["tokens"][: len(tokens)], f"{number} has another's tokens ({case['adapter']!r})"
        found = answers.logprobs.get(number, [])
        np.testing.assert_allclose(found, case["logprobs"][: len(found)], atol=compiled.tolerance)
    stats = engine.stats()
    assert stats.adapter_evictions > 200 and stats.preemptions > 20 and stats.failed_steps > 10
