"""build_engine: from a model directory to an engine that is ready, or words that say why not."""

import math
import threading
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import VARIANTS, build_checkpoint, random_tensors, write_tensors
from jax.errors import JaxRuntimeError

from engine import build, served_model
from engine.build import build_engine, planned
from engine.config import EngineConfig
from engine.devices.device_errors import device_errors
from engine.errors import ConfigurationError, DevicesUnavailable
from engine.memory import device_memory, page_budget
from engine.models.model_config import read_model_config
from engine.models.partition import Partition
from engine.models.weights.weight_format import Layout
from engine.sampling.operations import XLA_SAMPLING
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.history import new_history
from engine.step.backend_choice import choose_backend, xla_backend
from engine.step.compilation import num_compilations
from engine.step.execution_manager import ExecutionManager
from engine.step.executor import StepExecutor
from engine.step.sampling_programs import sampling_bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model whose context is 64 tokens."""
    return build_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """The same in one layer, for what is compiled."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def build_config(directory, **settings):
    """The smallest engine that has more than one of everything."""
    defaults = {"model": directory, "max_num_seqs": 2, "max_num_batched_tokens": 4, "page_size": 4}
    return EngineConfig(**(defaults | settings))


def compile_nothing(served, decoders, shapes):
    """In the place of the compiler, where steps are only counted with."""
    return ExecutionManager(decoders.model, shapes, served.backend, served.mesh)


def test_the_device_with_the_least_memory_left_says_how_much_there_is(directory, monkeypatch):
    """Of several each holds the same part of the pool; what somebody else has on one is not ours on any."""

    def device(limit, used):
        return SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": used})

    monkeypatch.setattr(jax, "local_devices", lambda: [device(1000, 0), device(1000, 300), device(800, 0)])

    assert device_memory.memory_budget(build_config(directory), 3) == 600
    assert device_memory.memory_budget(build_config(directory, hbm_utilization=1.0), 3) == 700


def test_on_a_cpu_a_little_more_or_less_free_memory_makes_no_other_pool(directory, monkeypatch):
    """The number of pages is a size of compiled steps, which a later start is to find; an operator's own share is exact."""

    def budget(available, **settings):
        monkeypatch.setattr(device_memory, "available_bytes", lambda: available)
        return device_memory.memory_budget(build_config(directory, **settings), 1)

    assert budget(17_000_000_000) == budget(17_400_000_000) == 6 * 2**30 < budget(19_000_000_000) == 7 * 2**30
    assert budget(17_000_000_000, hbm_utilization=0.5) == 8_500_000_000
    assert all(0.88 * 0.4 * size < budget(size) <= 0.4 * size for size in range(10**6, 10**7, 54321))


def silent_chip(kind, stats):
    """A device that says nothing of its memory, or whose runtime fails when it is asked."""
    return SimpleNamespace(memory_stats=stats, device_kind=kind, platform="tpu", id=0)


def fail_to_report():
    """As on TPU pods of some runtimes."""
    raise JaxRuntimeError("UNIMPLEMENTED: no memory stats\nwith more lines")


@pytest.mark.parametrize("stats", [lambda: None, dict, fail_to_report])
def test_a_chip_that_does_not_report_its_memory_is_planned_from_the_table(directory, monkeypatch, caplog, stats):
    """By what such a chip has and not by the host's memory; the log says so, with the number."""
    monkeypatch.setattr(jax, "local_devices", lambda: [silent_chip("TPU v5 lite", stats)] * 8)

    assert device_memory.memory_budget(build_config(directory), 8) == int(0.9 * 2**34)

    assert "TPU v5 lite 0 reports no memory_stats" in caplog.text
    assert "the 17,179,869,184 bytes that such a chip has, of which 0.9 may be used" in caplog.text


def test_an_unknown_chip_that_does_not_report_its_memory_is_refused(directory, monkeypatch):
    """The host's memory says nothing about an accelerator's."""
    monkeypatch.setattr(jax, "local_devices", lambda: [silent_chip("TPU v99", lambda: None)])

    with pytest.raises(ConfigurationError, match="TPU v99 reports no memory_stats, and its memory is known of TPU v4"):
        device_memory.memory_budget(build_config(directory), 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.thorough),
        pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.thorough),
    ],
)
def test_an_engine_is_ready_when_it_is_built(shallow, settings):
    """It reports its progress, counts from zero, and compiles nothing for requests of any kind."""
    reports = []

    engine = build_engine(build_config(shallow, max_num_seqs=4, **settings), reports.append)

    assert {report.stage for report in reports} == {"preparing kernels", "loading weights", "compiling"}
    assert all(report.done == report.total for report in reports[-1:])
    assert engine.stats().steps == engine.stats().generated_tokens == 0
    for number, params in enumerate((SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5))):
        for prompt in (1, 3, 9):
            engine.add(Sequence(f"{number} {prompt}", [5] * prompt, params, frozenset(), 5, seed=number))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.compilations_after_ready, stats.generated_tokens, stats.pages_owned) == (0, 45, 0)


def test_small_pages_hold_more_tokens_in_the_same_memory(directory):
    """The pool is counted in what pages take: 8 bits are a quarter of float32, but for the scales of int8."""
    config = build_config(directory)
    model = Partition(read_model_config(directory))
    beside = page_budget._step_scratch(config, model) + page_budget._sampling_bytes(config, model, 64, XLA_SAMPLING)

    def pages(dtype):
        one_page = xla_backend(np.dtype(dtype)).one_page(model, 4, np.dtype(dtype))
        return page_budget.CachePlanner(config, model, one_page, 0, beside + 7 * 4608, XLA_SAMPLING).pool.num_pages

    assert [pages(dtype) for dtype in (np.float32, jnp.bfloat16, jnp.float8_e5m2, np.int8)] == [7, 14, 28, 21]
    assert (
        served_model.served_model(build_config(directory, kv_cache_dtype="fp8")).describe()["dtype"]
        == "float32, pages in float8_e4m3fn"
    )


def test_bfloat16_weights_are_kept_as_stored_and_serve_as_float32(tmp_path):
    """Unless a dtype is asked for: the tokens are those of float32 weights, and people are told."""
    stored = build_checkpoint(tmp_path, "llama2_bfloat16", num_hidden_layers=1)

    def tokens(**settings):
        config = build_config(stored, page_size=16, staged_readiness=True, **settings)
        engine = build_engine(config, lambda progress: None)
        engine.add(Sequence("", [5, 6, 7], SamplingParams(temperature=1), frozenset(), 30, seed=3))
        return [token for _ in iter(lambda: engine.has_work, False) for out in engine.step() for token in out.token_ids]

    assert tokens() == tokens(dtype="float32")
    if choose_backend(16, 12, np.dtype(np.float32)).layout is Layout.PANELS:
        assert (
            served_model.served_model(build_config(stored)).describe()["dtype"]
            == "float32, weights as stored in bfloat16"
        )


def test_the_context_is_what_model_operator_and_pool_allow(directory):
    """max_model_len is the least of the model's, the operator's and what the pool holds."""

    def limit(**settings):
        config = build_config(directory, **settings)
        return build.build(
            config, lambda progress: None, lambda steps: steps.manager.shapes.max_model_len, compile_nothing
        )

    assert limit() == 64
    assert limit(max_model_len=20) == 20
    assert limit(num_pages=6) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 65}, "max_model_len 65 is more than the 64 positions"),
        ({"num_pages": 2}, "too few for one page for each of max_num_seqs 2"),
        ({"num_pages": 10**12}, "lower num_pages"),
        ({"num_pages": 6, "max_model_len": 21}, "the pool holds 20 tokens, which is less than max_model_len 21"),
        ({"max_model_len": 1}, "no room for a prompt and an answer: raise max_model_len"),
        ({"page_size": 1, "num_pages": 2, "max_num_seqs": 1}, "no room for a prompt and an answer"),
        ({"hbm_utilization": 1e-9}, "too few for one page"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_loaded(directory, settings, words):
    """Impossible sizes are a ConfigurationError that names the setting, before a weight is read."""
    reports = []

    with pytest.raises(ConfigurationError, match=words):
        build_engine(build_config(directory, **settings), reports.append)

    assert {report.stage for report in reports} <= {"preparing kernels"}


def test_room_for_earlier_texts_is_taken_from_the_pages(directory):
    """As much as they take on the device, which a plan says too."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 2%s}'
    none, some = (
        planned(served_model.served_model(build_config(directory, speculative_config=config)), 10**9)[1]
        for config in (drafts % "", drafts % ', "prompt_lookup_history": 5000')
    )

    assert none.earlier_bytes == 0 and some.reserved - none.reserved == some.earlier_bytes
    room = [jax.eval_shape(partial(new_history, 3, 64, 2, count)) for count in (0, 5000)]
    assert some.earlier_bytes == 4 * (math.prod(room[1].ids.shape) - math.prod(room[0].ids.shape)) > 0


def test_room_for_drafts_is_taken_from_the_pages(directory):
    """The tokens of all slots, and the sampler's further rows, where one sequence has more drafts than there are slots."""
    drafts = '{"method": "ngram", "num_speculative_tokens": %d}'
    configs = (build_config(directory, max_num_batched_tokens=8, speculative_config=drafts % count) for count in (1, 7))
    served = served_model.served_model(build_config(directory, max_num_batched_tokens=8))
    none, sampling = planned(served, 10**9)[1].reserved, served.backend.sampling
    few, many = (planned(served_model.served_model(config), 10**9)[1].reserved for config in configs)

    room = [4 * math.prod(jax.eval_shape(partial(new_history, 3, 64, count, 0)).ids.shape) for count in (1, 7)]
    assert few - none == room[0]
    more_rows = sampling_bytes(2, 8, 144, 1, sampling) - sampling_bytes(2, 2, 144, 1, sampling)
    assert many - few == room[1] - room[0] + more_rows


WORDS = "RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes.\nAnd much more."


def test_for_a_pool_that_the_device_refuses_nothing_is_compiled(shallow, monkeypatch):
    """Neither before the weights are there nor with them."""
    refuse_above(monkeypatch, 28)
    begun = []

    def begin(served, decoders, shapes):
        begun.append(shapes.cache.num_pages)
        return compile_nothing(served, decoders, shapes)

    def start(_steps):
        if len(begun) == 1:
            refuse_above(monkeypatch, 20)
            with device_errors():
                raise JaxRuntimeError(WORDS)
        return begun

    assert build.build(build_config(shallow), lambda progress: None, start, begin) == [26, 19]


def refuse_above(monkeypatch, allocation):
    """A device that has no memory for more than so many pages."""
    allocator = served_model.ServedModel.allocator

    def refusing(served, pool):
        def refuse():
            raise ValueError(WORDS)  # as on a CPU

        return refuse if pool.num_pages > allocation else allocator(served, pool)

    monkeypatch.setattr(served_model.ServedModel, "allocator", refusing)


def test_a_pool_that_the_device_refuses_is_made_smaller(shallow, monkeypatch, caplog):
    """An eighth of the pages less each time, whether allocation or the first step is refused, and it says so."""
    refuse_above(monkeypatch, 28)

    def start(steps):
        if steps.manager.shapes.cache.num_pages > 25:
            with device_errors():
                raise JaxRuntimeError(WORDS)  # as the first step of it would
        return steps.engine()

    def compile_what_fits(served, decoders, shapes):
        begin = compile_nothing if shapes.cache.num_pages > 25 else build.begin_compiling
        return begin(served, decoders, shapes)

    config = build_config(shallow, staged_readiness=True)
    engine = build.build(config, lambda progress: None, start, compile_what_fits)

    assert engine.stats().pages_total == 22
    said = [record.getMessage() for record in caplog.records if "trying" in record.getMessage()]
    assert [message.split(" pages")[0].split()[-1] for message in said] == ["33", "29", "26"]
    assert [message.split("trying ")[1].split(".")[0] for message in said] == ["29", "26", "23"]
    assert all("Out of memory allocating 1234 bytes." in message and "num_pages" in message for message in said)
    engine.add(Sequence("", [5, 6, 7], SamplingParams(), frozenset(), 9, seed=3))
    while engine.has_work:
        engine.step()
    assert (engine.stats().generated_tokens, engine.stats().failed_steps) == (9, 0)


@pytest.mark.parametrize("devices", [1, 2])
def test_num_pages_that_the_device_refuses_are_a_mistake_to_be_told(directory, monkeypatch, devices):
    """What was asked for is not made smaller, on one device or several; the message has the arithmetic and the setting."""
    refuse_above(monkeypatch, 32)

    with pytest.raises(
        ConfigurationError, match=r"33 pages \([0-9,]+ bytes\) beside [0-9,]+ bytes of weights.*lower num_pages"
    ):
        build_engine(build_config(directory, num_pages=33, tensor_parallel_size=devices), lambda progress: None)


def test_a_device_that_refuses_every_pool_is_a_mistake_to_be_told(directory, monkeypatch):
    """Fewer pages than sequences are of no use."""
    refuse_above(monkeypatch, 2)

    with pytest.raises(ConfigurationError, match="too few for one page for each of max_num_seqs 2"):
        build_engine(build_config(directory), lambda progress: None)


def test_a_step_that_takes_more_scratch_than_was_guessed_leaves_fewer_pages(directory, monkeypatch, caplog):
    """The pool shrinks by what the compiler says of the step, before anything is run."""
    config = build_config(directory)
    model = Partition(read_model_config(directory))
    served = served_model.served_model(config)
    weights, page = served.footprint.weight_bytes, 3 * 4 * 4 * 2 * 12 * 4
    guess, sampling = (
        page_budget._step_scratch(config, model),
        page_budget._sampling_bytes(config, model, 64, served.backend.sampling),
    )
    monkeypatch.setattr(build, "memory_budget", lambda *_: weights + guess + sampling + 33 * page)

    def compile_large(*arguments):
        manager = compile_nothing(*arguments)
        manager.scratch_bytes = guess + 10 * page
        return manager

    pages = build.build(
        config, lambda progress: None, lambda steps: steps.manager.shapes.cache.num_pages - 1, compile_large
    )

    assert pages == 22
    assert "23 pages instead of 33" in caplog.text


def test_weights_are_read_while_steps_are_compiled(shallow):
    """A function is being compiled when the first of them is reported."""
    compiling, reading = threading.Event(), threading.Event()

    class Manager(ExecutionManager):
        def _compile(self, program):
            compiling.set()
            assert reading.wait(60)
            super()._compile(program)

    def begin(served, decoders, shapes):
        manager = Manager(decoders.model, shapes, served.backend, served.mesh)
        manager.begin(staged=True)
        return manager

    def report(progress):
        if progress.stage == "loading weights":
            assert compiling.wait(60)
            reading.set()

    engine = build.build(build_config(shallow), report, lambda steps: steps.engine(), begin)

    engine.add(Sequence("", [5, 6, 7], SamplingParams(), frozenset(), 9, seed=3))
    while engine.has_work:
        engine.step()
    assert (engine.stats().generated_tokens, engine.stats().failed_steps) == (9, 0)


def test_nothing_more_is_compiled_for_weights_that_cannot_be_read(tmp_path):
    """What has not begun by then never does."""
    directory = build_checkpoint(tmp_path, num_hidden_layers=1)
    tensors = random_tensors(VARIANTS["llama2"].config | {"num_hidden_layers": 1}, 0)
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    managers = []

    def begin(*arguments):
        managers.append(build.begin_compiling(*arguments))
        return managers[-1]

    with pytest.raises(ConfigurationError, match="norm"):
        build.build(build_config(directory), lambda progress: None, lambda steps: steps.engine(), begin)

    managers[0]._compilers.shutdown()
    compiled = [job for job in managers[0]._compiling if not job.cancelled() and job.exception() is None]
    assert len(compiled) < len(managers[0]._compiling)


def test_devices_that_cannot_be_taken_are_told_in_their_words(directory, monkeypatch):
    """Without what JAX puts around them."""
    words = "ABORTED: The TPU is already in use by process with pid 7. Not attempting to load libtpu.so."

    def refuse():
        raise RuntimeError(f"Unable to initialize backend 'tpu': {words} (set JAX_PLATFORMS='' to choose another)")

    monkeypatch.setattr(jax, "devices", refuse)

    with pytest.raises(DevicesUnavailable) as refused:
        build_engine(build_config(directory), lambda progress: None)
    assert str(refused.value) == words


def test_a_model_that_gives_no_numbers_is_not_served(tmp_path):
    """NaN in answer to the first prompt is found before anybody is served."""
    directory = build_checkpoint(tmp_path, num_hidden_layers=1)
    tensors = random_tensors(VARIANTS["llama2"].config | {"num_hidden_layers": 1}, 0)
    tensors["model.norm.weight"][:] = np.nan
    write_tensors(directory, tensors)

    with pytest.raises(ConfigurationError, match=r"NaN or infinity .* weights are damaged"):
        build_engine(build_config(directory, staged_readiness=True), lambda progress: None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0), ("page_size", 0), ("max_model_len", 0), ("num_pages", 1), ("hbm_utilization", 1.5),
        ("dtype", "int3"), ("kv_cache_dtype", "int3"), ("run_ahead", -1), ("max_num_batched_tokens", 1),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(directory, name, value):
    """EngineConfig refuses it with its name, the allowed range and the value given."""
    with pytest.raises(ConfigurationError, match=rf"{name} must be .*, not {value}"):
        build_config(directory, **{name: value})


@pytest.mark.parametrize(("batched", "sequences"), [(512, 64), (8, 8)])
def test_as_many_sequences_run_as_a_step_has_tokens(batched, sequences):
    """Where nobody says how many, and 64 at most; more than tokens are refused."""
    assert EngineConfig(max_num_batched_tokens=batched).max_num_seqs == sequences
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens must be at least max_num_seqs"):
        EngineConfig(max_num_batched_tokens=batched, max_num_seqs=batched + 1)


def test_the_state_of_an_engine_takes_one_program_of_each_kind(shallow):
    """Those of slots, of what they are fed, of bias and of penalties, and two of a key: every start makes them."""
    config = build_config(shallow)
    served = served_model.served_model(config)
    served, planner = planned(served, device_memory.memory_budget(config, 1))
    manager = compile_nothing(served, served.abstract_all(), planner.shapes(served.backend, None))
    manager.new_cache()
    before = num_compilations()

    StepExecutor(manager, 0)

    assert num_compilations() - before <= 6


def test_a_compilation_in_service_is_counted():
    """The counter moves when something new is compiled, so that a 0 means something."""
    before = num_compilations()

    jax.jit(lambda x: x * 3 + before)(jnp.arange(7))

    assert num_compilations() > before
