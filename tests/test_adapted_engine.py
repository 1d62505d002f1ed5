"""Adapters in the engine against PEFT on torch: alone and mixed, with fewer slots than adapters, loaded and removed meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
from adapter_engines import FLOAT32, MAX_MODEL_LEN, Answers, adapter_engines, request
from adapter_files import ADAPTERS, LINEAR, AdapterKind, write_adapter
from jax.errors import JaxRuntimeError
from tpu_twins import PallasTwin

from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS
from engine.adapters.adapter import AdapterError
from engine.hosts.follower import execute_commands
from engine.hosts.other_processes import OtherProcesses
from engine.step.backend import tpu_backend, xla_backend
from engine.step.commands import Leave, decode_command, encode
from engine.step.executor import StepExecutor
from engine.step.runner import eSurgeRunner

XLA = xla_backend(FLOAT32)
OF_LATENTS = xla_backend(FLOAT32, latents=True)
TPU = replace(tpu_backend(CHIPS["TPU v5 lite"], PALLAS), attention=PallasTwin())
BACKENDS = [
    pytest.param(("llama2", None, 1), id="llama2"),
    *(
        pytest.param((variant, backend, devices), id=f"{variant}-{name}", marks=pytest.mark.thorough)
        for variant in ADAPTERS
        for name, backend, devices in (
            ("kernels", None, 1),
            ("XLA-2", XLA, 2),
            ("TPU", TPU, 1),
        )
        if not (variant == "deepseek_v3" and backend is TPU) and (variant, name) != ("llama2", "kernels")
    ),
    pytest.param(("llama2", TPU, 2), id="llama2-TPU-2", marks=pytest.mark.thorough),
    pytest.param(("phi3", TPU, 2), id="phi3-TPU-2", marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module", params=BACKENDS)
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
    engine.add_adapter(adapter)
    return adapter.uid


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
    groups = compiled.manager.shapes.groups
    engine, answers = compiled.engine(num_pages=groups.pages_of(MAX_MODEL_LEN) + 3), Answers()
    for number, case in enumerate(compiled.cases):
        uid = add(engine, compiled.directories[case["adapter"]]) if case["adapter"] else 0
        engine.add(request(str(number), case, uid))
        for _ in range(3):
            answers.take(engine.step())
        if uid:
            engine.remove_adapter(uid)

    answers.run(engine)

    for number, case in enumerate(compiled.cases):
        answers.assert_golden(str(number), case, compiled.tolerance)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert engine.adapters() == [] and not stats.adapters_running and not stats.adapters_waiting
    assert not engine._runner._executor._adapters, "a removed adapter is still in host memory"


def test_what_failed_steps_lose_is_written_again(compiled, monkeypatch):
    """A step that the device refuses ends its own requests; the others get their own adapters' tokens from new slots."""
    engine, answers, faults = compiled.engine(), Answers(), [5, 11]
    uids = load_all(engine, compiled)
    forward = type(compiled.manager).adapted_forward

    def refuse(*_):
        raise JaxRuntimeError("INTERNAL: a wire has come loose")

    def faulty(manager, layout):
        faults[:] = [number - 1 for number in faults]
        return refuse if 0 in faults else forward(manager, layout)

    monkeypatch.setattr(type(compiled.manager), "adapted_forward", faulty)
    for number, case in enumerate(compiled.cases):
        engine.add(request(str(number), case, uids[case["adapter"]]))

    answers.run(engine)

    assert 0 < len(answers.errors) < len(compiled.cases) and engine.stats().failed_steps == len(faults)
    for number, case in enumerate(compiled.cases):
        if str(number) not in answers.errors:
            answers.assert_golden(str(number), case, compiled.tolerance)


def test_a_request_whose_adapter_was_never_loaded_is_refused(compiled):
    """It is never served by the model alone."""
    engine = compiled.engine()

    with pytest.raises(AdapterError, match="not loaded any more"):
        engine.add(request("0", compiled.cases[0], 7))


def test_another_process_gets_the_same_tokens_from_the_commands_alone(compiled):
    """It has no files: adapters come to it as they are written to slots, and go when nobody has them any more."""
    frames = []
    runner = eSurgeRunner(compiled.manager, 0, OtherProcesses(lambda command: frames.append(encode(command))))
    engine, follower = compiled.engine(runner=runner), StepExecutor(compiled.manager, 0)
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
def test_64_adapters_of_ranks_8_to_64_in_8_slots_give_each_request_what_it_gets_alone(tmp_path):
    """Requests with any of them come at random, and adapters are removed and read again while these run."""
    compiled = adapter_engines(tmp_path, "llama2", max_loras=8, max_lora_rank=64)
    kinds = [AdapterKind(LINEAR, 8 + 56 * number // 63, seed=100 + number) for number in range(64)]
    directories = [write_adapter(tmp_path / f"adapter {number}", "llama2", kind) for number, kind in enumerate(kinds)]
    rng, engine, answers = np.random.default_rng(3), compiled.engine(), Answers()
    uids, asked = [add(engine, directory) for directory in directories], []
    for number in range(192):
        which, case = int(rng.integers(64)), number % len(compiled.cases)
        engine.add(request(str(number), compiled.cases[case], uids[which]))
        asked.append((which, case))
        for _ in range(int(rng.integers(4))):
            answers.take(engine.step())
        engine.remove_adapter(uids[which])
        uids[which] = add(engine, directories[which])

    answers.run(engine)

    alone: dict[tuple[int, int], Answers] = {}
    for number, (which, case) in enumerate(asked):
        if (which, case) not in alone:
            by_itself = compiled.engine()
            by_itself.add(request("alone", compiled.cases[case], add(by_itself, directories[which])))
            alone[which, case] = Answers().run(by_itself)
        assert answers.tokens[str(number)] == alone[which, case].tokens["alone"]
        found, wanted = answers.logprobs[str(number)], alone[which, case].logprobs["alone"]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert engine.stats().adapter_evictions > 50
