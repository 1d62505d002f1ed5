"""``odriver plan``: the arithmetic, the words where it cannot be, and, where libtpu is installed, the compiler's report."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from checkpoints import VARIANTS

from caching.tpu.tpu_chip import CHIPS
from engine.config import EngineConfig
from engine.devices.mesh import one_device
from engine.errors import ConfigurationError
from engine.models.layers.experts import ExpertsSpec
from engine.models.model_config import read_config_file
from engine.models.partition import Partition, split
from engine.models.weights.store import parameter_bytes
from engine.models.weights.weight_format import Layout, WeightFormat
from engine.planner.chip_fit import ChipFit
from engine.planner.chip_plan import ChipPlan
from engine.planner.compiled_function import CompiledFunction, CompiledProgram, Exchange, ExpertStack, LargeArrays
from engine.planner.experts_read import share_read
from engine.planner.hlo_traffic import Collective, Moved
from engine.planner.ici import exchange_seconds
from engine.planner.pages_read import pages_read
from engine.planner.planned_steps import batch_sizes, decode_steps
from engine.planner.roofline import Roofline
from engine.step.backend_choice import xla_backend
from engine.step.compilation import Compilation
from ipc.commands.cli import main

CONFIGS, PROGRAMS = Path(__file__).parent / "configs", Path(__file__).parent / "programs"
V5E, V6E = CHIPS["TPU v5 lite"], CHIPS["TPU v6 lite"]
BFLOAT16 = np.dtype(jnp.bfloat16)


def write_config(directory, name, **changed):
    """A directory with a config.json, and nothing else: one of CONFIGS with some of it changed."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / f"{name}.json").read_text()) | changed))
    return path


def test_a_step_must_read_weights_pages_and_logits():
    """Llama-3-8B on a v6e: 15 GB of weights but for the embedding, 128 kB a token of context, 501 kB of logits a sequence."""
    model = Partition(read_config_file(CONFIGS / "Llama-3-8B.json"))

    step = Roofline(V6E, model, WeightFormat(BFLOAT16), BFLOAT16, 16_000_000_000).step(
        4, 1000, Moved(20_000_000_000, 500_000_000), 0.001
    )

    weights = 16_000_000_000 - 2 * 128256 * 4096
    assert step.bytes_needed == weights + 4 * 1000 * 131072 + 4 * 4 * 128256
    assert (step.bytes_read, step.bytes_written) == (20_000_000_000, 500_000_000)
    assert step.bandwidth_seconds == pytest.approx(20.5e9 / 1.64e12)
    flops = 2 * (8_030_261_248 - 128256 * 4096) + 4 * 32 * 128 * 32 * 1000
    assert step.compute_seconds == pytest.approx(4 * flops / 918e12, rel=1e-3)
    assert step.tokens_per_second == pytest.approx(4 / (step.bandwidth_seconds + 0.001))


def test_a_step_that_verifies_drafts_computes_them_and_reads_the_pages_once():
    """Of Llama-3-8B: five times the products and logits; as many tokens as are accepted, and one of its own."""
    model = Partition(read_config_file(CONFIGS / "Llama-3-8B.json"))
    roofline = Roofline(V6E, model, WeightFormat(BFLOAT16), BFLOAT16, 16_000_000_000)

    plain, verified = (roofline.step(4, 1000, Moved(20_000_000_000, 0), 0.0, drafts) for drafts in (0, 4))

    assert verified.compute_seconds == pytest.approx(5 * plain.compute_seconds)
    assert verified.bytes_needed - plain.bytes_needed == 4 * 4 * 4 * 128256
    assert verified.tokens_per_second == verified.tokens_per_second_at(0) == plain.tokens_per_second
    assert verified.tokens_per_second_at(0.5) == pytest.approx(
        plain.tokens_per_second * (1 + 0.5 + 0.25 + 0.125 + 0.0625)
    )
    assert verified.tokens_per_second_at(1) == pytest.approx(5 * plain.tokens_per_second)


def test_a_step_must_read_the_state_of_each_sequence():
    """However long the sequences are."""
    model = Partition(read_config_file(CONFIGS / "Llama-3-8B.json"))

    without, with_states = (
        Roofline(V6E, model, WeightFormat(BFLOAT16), BFLOAT16, 16_000_000_000, state_bytes).step(4, 1000, Moved(), 0.0)
        for state_bytes in (0, 8_000_000)
    )

    assert with_states.bytes_needed - without.bytes_needed == 4 * 8_000_000


def test_each_of_several_chips_reads_its_part():
    """On 16 chips a kv head is on two of them: of 8 heads, each chip reads one."""
    model = split(read_config_file(CONFIGS / "Llama-3-8B.json"), 16)

    step = Roofline(V6E, model, WeightFormat(BFLOAT16), BFLOAT16, 1_000_000_000).step(4, 1000, Moved(), 0.0)

    table = model.padded_vocab_size // 16 * 4096 * 2
    assert step.bytes_needed == 1_000_000_000 - table + 4 * (1000 * 32 * 2 * 128 * 2 + 4 * 128256 // 16)


@pytest.mark.parametrize(("backend", "tokens"), [("jax", 2 * 5 * 128), ("pallas", 32 * 32)])
def test_attention_reads_what_its_kernel_moves_at_once(backend, tokens):
    """Of 1,000 tokens of 8 kv heads on a v6e jax's kernel reads two blocks of five pages of 128, ours quarters of pages."""
    one = fit("Llama-3-8B", 1, V6E, attention_backend=backend)

    read = pages_read(one, one.planner().shapes(one.backend, None), 1000)

    assert read == [tokens * 2 * 8 * 128 * 2] * 32


@pytest.mark.parametrize(("queries", "seen"), [(1, 128), (2, 256), (129, 256), (130, 384), (2048, 1024)])
def test_attention_skips_the_pages_before_a_window(queries, seen):
    """Half of gpt-oss's layers see 128 tokens: the last of 1,024 those of one page, and each earlier query some more."""
    one = fit("gpt-oss-20b", 4, V6E)

    read = pages_read(one, one.planner().shapes(one.backend, None), 1024, queries)

    assert read == [tokens * 2 * 2 * 64 * 2 for tokens in [seen, 1024] * 12]


def test_a_sum_over_chips_takes_its_bytes_and_its_way():
    """Eight v5e in a ring that runs both ways: seven eighths are sent twice, and each time half way round."""
    summed, gathered = (Collective(kind, 8_000_000, (), 1, 0) for kind in ("all-reduce", "all-gather"))

    assert exchange_seconds(summed, V5E, 8) == pytest.approx(2 * (7e6 / 100e9 + 4e-6))
    assert exchange_seconds(gathered, V5E, 8) == pytest.approx(7e6 / 100e9 + 4e-6)


def fit(name, chips, chip=V5E, **settings):
    """A model on so many chips."""
    return ChipFit(EngineConfig(**settings), split(read_config_file(CONFIGS / f"{name}.json"), chips), chip, BFLOAT16)


@pytest.mark.parametrize(
    ("name", "chips", "advice"),
    [
        ("Llama-3-8B", 1, "The smallest that does: tp=2"),
        ("Qwen3-8B", 1, "The smallest that does: tp=2"),
        ("Qwen3-32B", 4, "The smallest that does: tp=8"),
        ("Llama-3-70B", 8, "The smallest that does: tp=16, which takes a topology of at least 16 chips"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(name, chips, advice):
    """Weights, scratch and the fewest pages, what they add up to and what there is; and how many chips do."""
    one = fit(name, chips)
    needed = one.footprint.weight_bytes + one.planner().reserved + 65 * one.footprint.one_page.bytes_per_page

    with pytest.raises(ConfigurationError) as refused:
        one.check(8)

    assert f"it does not fit on {chips} chip{'s' if chips > 1 else ''}: " in str(refused.value)
    assert f"are {needed:,} bytes a chip, and of its 17,179,869,184 may be used 15,461,882,265" in str(refused.value)
    assert str(refused.value).endswith(advice)


def test_what_fits_is_not_refused():
    """Llama-3-8B on eight v5e, and on one v6e."""
    fit("Llama-3-8B", 8).check(8)
    fit("Llama-3-8B", 1, V6E).check(1)


def test_what_fits_on_no_number_of_chips_says_so():
    """When the fewest pages are too many anywhere."""
    with pytest.raises(ConfigurationError, match="No number of chips up to 256 does: lower max_num_seqs or"):
        fit("Llama-3-8B", 1, max_num_seqs=100_000, max_num_batched_tokens=100_000).check(8)


class Executable:
    """A program that was compiled elsewhere."""

    def __init__(self, name):
        self._name = name

    def as_text(self):
        return (PROGRAMS / f"{self._name}.hlo").read_text()

    def memory_analysis(self):
        return None


def compiled(name):
    """One of the programs of test_hlo_traffic, with what is large in it."""
    shapes = ((3, 512, 2048), (3, 2048, 512), (4096, 512))
    weights, pages = (
        [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in group] for group in (shapes, [(12288, 2, 128)])
    )
    arrays = LargeArrays(
        tuple(weights), tuple(pages), jax.ShapeDtypeStruct((8, 4096), jnp.float32), num_layers=3, experts=()
    )
    return CompiledProgram(Compilation("step", 8, 1.5, Executable(name), is_new=True), arrays)


def test_a_compiled_function_is_reported():
    """By its name and size, with the sums over chips that a layer has and no copies."""
    report = compiled("scanned").report

    assert report == CompiledFunction("step", 8, 1.5, 0, True, [], [], [Exchange("all-reduce", 1.0, 0, 3 * 40960)])


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.25), (2, 0.4375), (64, 1.0)])
def test_few_tokens_read_few_experts(tokens, share):
    """One of two of eight experts reads a quarter of its columns; the next may choose the same, and many tokens all."""
    columns = ExpertsSpec(intermediate_size=1024, num_experts=8, experts_per_token=2)

    assert share_read(columns, tokens, 8) == pytest.approx(share, abs=0.1)


def test_the_chip_with_most_of_the_experts_is_waited_for():
    """Two of eight on eight chips: two chips read all they have, and the others nothing."""
    whole = ExpertsSpec(intermediate_size=100, num_experts=8, experts_per_token=2)

    assert share_read(whole, 1, 8) == 1
    assert 0.25 < share_read(whole, 1, 2) < 0.5


def test_a_step_must_read_the_experts_that_are_chosen():
    """Of Mixtral-8x7B on eight chips two experts for one sequence, and all for 64; and a token is multiplied by two."""
    model = split(read_config_file(CONFIGS / "Mixtral-8x7B.json"), 8)
    roofline = Roofline(V5E, model, WeightFormat(BFLOAT16), BFLOAT16, 12_000_000_000)

    one, many = (roofline.step(sequences, 0, Moved(), 0.0) for sequences in (1, 64))

    experts = 32 * 8 * 3 * 4096 * 14336 * 2 // 8
    others = 12_000_000_000 - experts - model.padded_vocab_size // 8 * 4096 * 2
    assert one.bytes_needed == pytest.approx(others + experts / 4, rel=1e-4)
    assert many.bytes_needed == pytest.approx(others + experts, rel=1e-3)
    assert (one.experts_read, many.experts_read) == (0.25, pytest.approx(1))
    numbers = parameter_bytes(model, WeightFormat(np.dtype(np.int8))) - model.padded_vocab_size // 8 * 4096
    multiplied = numbers - experts // 2 * 3 // 4
    assert one.compute_seconds == pytest.approx(2 * multiplied / V5E.bf16_flops, rel=1e-4)


def test_the_zeros_behind_a_tables_columns_take_memory_but_are_not_read_with_the_embedding():
    """gpt-oss's 2,880 columns are 2,944 on a TPU: in the embedding, of which a step reads rows, and in the head."""
    model = split(read_config_file(CONFIGS / "gpt-oss-20b.json"), 8)
    rows, experts = model.padded_vocab_size // 8, 24 * 32 * 3 * 2880 * 2880 * 2 // 8

    padded, plain = (parameter_bytes(model, WeightFormat(BFLOAT16, layout)) for layout in (Layout.MATRIX, Layout.AXES))
    step = Roofline(V5E, model, WeightFormat(BFLOAT16), BFLOAT16, padded).step(1, 0, Moved(), 0.0)

    assert padded - plain == 2 * rows * 64 * 2
    logits = 4 * model.model.vocab_size // 8
    read = padded - rows * 2944 * 2 - experts + step.experts_read * experts + logits
    assert step.bytes_needed == pytest.approx(read, abs=1000)


@pytest.mark.parametrize("chips", [1, 2])
def test_a_table_of_positions_is_on_each_chip_and_is_not_read_with_the_weights(tmp_path, chips):
    """Of GPT-2's a step reads a row for each token."""
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["gpt2"].config))
    model, table = read_config_file(tmp_path / "config.json"), 64 * 64 * 2
    without = replace(
        model, position_offset=None, tensors=tuple(one for one in model.tensors if one[0] != "position_table")
    )
    form, steps, sizes = WeightFormat(BFLOAT16), [], []

    for one in (model, without):
        sizes.append(parameter_bytes(split(one, chips), form))
        steps.append(Roofline(V5E, split(one, chips), form, BFLOAT16, sizes[-1]).step(1, 0, Moved(), 0.0))

    assert sizes[0] - sizes[1] == table
    assert steps[0].bytes_needed == steps[1].bytes_needed


LFM2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": None, "full_attn_idxs": [2]} | {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "block_ff_dim": 512, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(("name", "looped"), [(None, 0), ("Granite-4.0-H-Tiny", 36 * 48 * 64 * 128 * 4)])
def test_states_count_again_where_a_loop_over_rows_has_them(tmp_path, name, looped):
    """The compiled loop is counted as one trip, of eight rows. The windows of convolutions are in none."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LFM2) if name is None else (CONFIGS / f"{name}.json").read_text())
    fit = ChipFit(EngineConfig(), split(read_config_file(path), 1), V6E, BFLOAT16)
    shapes = fit.planner().shapes(fit.backend, None)
    arrays = LargeArrays((), (), jax.ShapeDtypeStruct((64, 512), jnp.float32), 3, ())
    program = "HloModule step\n\nENTRY %main () -> s32[] {\n  ROOT %c = s32[] constant(1)\n}\n"
    executable = SimpleNamespace(as_text=lambda: program, memory_analysis=lambda: None)
    programs = [
        CompiledProgram(Compilation(each, 64, 1.5, executable, is_new=True), arrays) for each in ("step", "greedy")
    ]

    steps = decode_steps(fit, programs, shapes, 128)

    assert {step.sequences: step.bytes_written for step in steps} == {1: 0, 4: 0, 16: 8 * looped, 64: 56 * looped}


STACK = """HloModule experts

ENTRY %main (p0: bf16[12,256,512], p1: bf16[16,256]) -> f32[16,512] {
  %p0 = bf16[12,256,512]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[16,256]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %ragged-dot = f32[16,512]{1,0:T(8,128)} custom-call(%p1, %p0), custom_call_target="tpu_custom_call"
}
"""


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (1000, 4)])
def test_a_product_reads_experts_of_its_layer(tokens, experts):
    """Of a stack of three layers with four experts each, of which a token has one."""
    array = jax.ShapeDtypeStruct((3, 4, 256, 512), jnp.bfloat16, sharding=one_device().sharding())
    stack = ExpertStack(array, ExpertsSpec(512, 4, 1))
    arrays = LargeArrays((array,), (), jax.ShapeDtypeStruct((8, 4096), jnp.float32), 3, (stack,))
    executable = SimpleNamespace(as_text=lambda: STACK, memory_analysis=lambda: None)

    moved = CompiledProgram(Compilation("step", 16, 1.5, executable, is_new=True), arrays).traffic(0, tokens).moved

    assert moved == Moved(experts * 256 * 512 * 2 + 16 * 256 * 2, 16 * 512 * 4)


def test_experts_are_of_the_stack_that_has_so_many():
    """Gates and ups of one layer are as many numbers as what goes down in two: all four experts are read, and not two."""
    down, gate_up = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one_device().sharding())
        for shape in ((6, 4, 256, 256), (3, 4, 256, 2, 256))
    )
    stacks = tuple(ExpertStack(array, ExpertsSpec(256, 4, 4)) for array in (down, gate_up))
    arrays = LargeArrays((), (), jax.ShapeDtypeStruct((8, 4096), jnp.float32), 9, stacks)
    executable = SimpleNamespace(as_text=lambda: STACK, memory_analysis=lambda: None)

    moved = CompiledProgram(Compilation("step", 16, 1.5, executable, is_new=True), arrays).traffic(0, 16).moved

    assert moved.read == 4 * 256 * 512 * 2 + 16 * 256 * 2


def test_copies_and_gathers_are_named():
    """With what they make, and how often."""
    report = compiled("copying").report

    assert report.copies == ["copy-start.1: bf16[12288, 2, 128], 1 times"]
    assert report.gathers == ["all-gather of 4,194,304 bytes, 3 times"]


@pytest.mark.parametrize("shape", ["1,768,1024", "768,1024", "2,768,1024", "64,64,256", "128,64,256", "96,6144"])
def test_a_copy_of_a_layer_is_named_where_not_all_layers_are_alike(shape):
    """Of six layers two of a kind are a stack, the pages are of two, and four have a state."""
    layout = f"bf16[{shape}]{{{','.join(map(str, reversed(range(shape.count(',') + 1))))}:T(8,128)(2,1)}}"
    program = f"""\
HloModule step, is_scheduled=true

ENTRY %main (p0: bf16[{shape}]) -> bf16[{shape}] {{
  %p0 = {layout} parameter(0)
  ROOT %made = {layout} copy(%p0)
}}
"""
    weight, *pools = (
        jax.ShapeDtypeStruct(every, jnp.bfloat16) for every in ((2, 768, 1024), (128, 64, 256), (384, 6144))
    )
    arrays = LargeArrays((weight,), tuple(pools), jax.ShapeDtypeStruct((64, 512), jnp.float32), 6, (), (64, 96))
    executable = SimpleNamespace(as_text=lambda: program, memory_analysis=lambda: None)

    report = CompiledProgram(Compilation("step", 16, 1.5, executable, is_new=True), arrays).report

    assert len(report.copies) == 1


@pytest.mark.parametrize(("logits", "gathers"), [((8, 128256), 0), ((512, 4096), 1)])
def test_a_gather_of_activations_is_not_one_of_weights(logits, gathers):
    """They may be as many numbers as a weight; where they are those of logits it is named."""
    program = """\
HloModule step, is_scheduled=true

ENTRY %main (p0: bf16[512,512]) -> bf16[512,4096] {
  %p0 = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather = bf16[512,4096]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=1, dimensions={1}
}
"""
    weight = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16, sharding=one_device().sharding())
    arrays = LargeArrays((weight,), (), jax.ShapeDtypeStruct(logits, jnp.float32), 3, ())
    executable = SimpleNamespace(as_text=lambda: program, memory_analysis=lambda: None)

    report = CompiledProgram(Compilation("step", 512, 1.5, executable, is_new=True), arrays).report

    assert len(report.gathers) == gathers


LOGITS = "f32[64,16384]{1,0:T(8,128)"


@pytest.mark.parametrize(
    ("space", "made", "copies"),
    [
        ("S(1)", f"({LOGITS}}}, {LOGITS}S(1)}}, u32[]{{:S(2)}}) copy-start(%p0)", []),
        ("", f"{LOGITS}}} convolution(%p1, %p2), dim_labels=bf_oi->bf", []),
        ("", f"{LOGITS}}} copy(%p0)", ["made: f32[64, 16384], 1 times"]),
    ],
    ids=["written from VMEM", "computed", "copied"],
)
def test_logits_that_a_step_makes_are_not_a_copied_weight(space, made, copies):
    """LFM2's of 64 rows are as many numbers as its square weights. Once they are in HBM, a copy of them is named."""
    program = f"""\
HloModule step, is_scheduled=true

ENTRY %main (p0: f32[64,16384]) -> f32[64,16384] {{
  %p0 = {LOGITS}{space}}} parameter(0)
  %p1 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} parameter(1)
  %p2 = bf16[16384,1024]{{1,0:T(8,128)(2,1)}} parameter(2)
  ROOT %made = {made}
}}
"""
    weight = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.bfloat16, sharding=one_device().sharding())
    arrays = LargeArrays((weight,), (), jax.ShapeDtypeStruct((64, 16384), jnp.float32), 3, ())
    executable = SimpleNamespace(as_text=lambda: program, memory_analysis=lambda: None)

    report = CompiledProgram(Compilation("step", 512, 1.5, executable, is_new=True), arrays).report

    assert report.copies == copies


def test_batch_sizes_are_powers_of_four_and_the_most():
    """The largest is what the operator set."""
    assert batch_sizes(64, drafts=0, most_samples=64) == [1, 4, 16, 64]
    assert batch_sizes(100, drafts=0, most_samples=100) == [1, 4, 16, 64, 100]
    assert batch_sizes(1, drafts=0, most_samples=1) == [1]


def test_drafts_are_planned_for_as_many_sequences_as_a_step_verifies_them_of():
    """Of one at least, also where fewer may run than a row with all its drafts has tokens."""
    assert batch_sizes(64, drafts=4, most_samples=64) == [1, 4]
    assert batch_sizes(4, drafts=8, most_samples=9) == [1]
    assert batch_sizes(4, drafts=4, most_samples=4) == []


def test_without_libtpu_it_says_what_to_install(monkeypatch, capsys):
    """A configuration error, in plain words."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else found(name))

    assert main(["plan", str(CONFIGS / "Qwen3-8B.json"), "--topology", "v5e:2x4"]) == 78

    assert 'libtpu, which compiles for v5e:2x4, is not installed: pip install "odriver[tpu]"' in capsys.readouterr().err


def test_what_takes_memory_of_a_daemon_may_be_planned_for(monkeypatch, capsys):
    """By the same flags as in ``serve``: adapters, the host cache, and a number of pages."""
    given = []

    def plan_chips(config, *arguments):
        given.append((config, *arguments))
        raise ConfigurationError("seen")

    monkeypatch.setattr("engine.planner.chip_planner.plan_chips", plan_chips)
    flags = "--enable-lora --max-loras 2 --max-lora-rank 64 --lora-dtype bfloat16 --host-cache-gib 1.5 --num-pages 99"
    modules = ("--lora-target-modules", "q_proj", "experts")

    assert main(["plan", str(CONFIGS / "Qwen3-8B.json"), "--topology", "v6e-1", *flags.split(), *modules]) == 78

    assert "seen" in capsys.readouterr().err
    ((config, *_),) = given
    assert (config.enable_lora, config.max_loras, config.max_lora_rank, config.lora_dtype) == (True, 2, 64, "bfloat16")
    assert (config.lora_target_modules, config.host_cache_gib, config.num_pages) == (("q_proj", "experts"), 1.5, 99)


def test_whatever_kernel_and_dtypes_a_daemon_may_have_may_be_planned_for(monkeypatch, capsys):
    """The choices are those of ``serve``; pages in int8 have the one kernel that reads them there, too."""
    given = []

    def plan_chips(config, *_):
        given.append(config)
        raise ConfigurationError("seen")

    monkeypatch.setattr("engine.planner.chip_planner.plan_chips", plan_chips)
    flags = "--dtype float32 --kv-cache-dtype int8 --attention-backend xla --no-enable-prefix-caching"

    assert main(["plan", str(CONFIGS / "Qwen3-8B.json"), "--topology", "v6e-1", *flags.split()]) == 78

    assert "seen" in capsys.readouterr().err
    (config,) = given
    assert (config.dtype, config.kv_cache_dtype, config.attention_backend) == ("float32", "int8", "xla")
    assert not config.enable_prefix_caching
    planned = fit("Qwen3-8B", 8, V6E, kv_cache_dtype="int8", attention_backend="xla")
    assert planned.backend.attention == xla_backend(np.dtype(np.int8)).attention
    assert planned.footprint.one_page.dtype == np.int8
    with pytest.raises(ConfigurationError, match="choose fp8, or attention_backend xla"):
        _ = fit("Qwen3-8B", 8, V6E, kv_cache_dtype="int8").kernel


@pytest.mark.parametrize("gib", [-1, float("inf"), float("nan"), 1e300])
def test_a_host_cache_of_no_size_that_a_host_has_is_refused(gib):
    """In words, and not by the arithmetic of its slots."""
    with pytest.raises(ConfigurationError, match=r"host_cache_gib must be 0 \(none\) to 65536, not "):
        EngineConfig(host_cache_gib=gib)


@pytest.fixture(scope="module")
def _libtpu():
    pytest.importorskip("libtpu")


@pytest.mark.usefixtures("_libtpu")
@pytest.mark.parametrize(
    ("name", "topology", "settings"),
    [
        ("Llama-3-8B", "v5e:2x4", []),
        ("Qwen3-8B", "v6e:2x4", ["--quantization", "int8", "--kv-cache-dtype", "fp8"]),
        ("Mixtral-8x7B", "v5e:2x4", []),
        ("Mixtral-8x7B", "v6e:2x4", ["--quantization", "int8"]),
    ],
)
def test_nothing_large_is_copied_or_gathered(tmp_path, name, topology, settings):
    """Of narrower models with two layers: two sums a layer, little scratch, and no weights of 8 bits written out in more.

    Each in a process of its own, as libtpu compiles for one topology in a process, and crashes at another's.
    """
    narrow = {
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 128,
        "vocab_size": 8192,
    }
    path = write_config(tmp_path, name, **narrow)
    few = ("--max-num-batched-tokens", "16", "--max-num-seqs", "16")

    program = "import sys; from ipc.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "plan", path, "--topology", topology, "--json", *few, *settings]

    said = subprocess.run(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, check=True).stdout

    plan = msgspec.json.decode(said, type=ChipPlan)
    assert [step.size for step in plan.steps] == [16]
    assert [(one.copies, one.gathers) for one in plan.functions] == [([], [])] * len(plan.functions)
    for step in plan.steps:
        assert [(one.kind, one.per_layer) for one in step.exchanges] == [("all-reduce", 2)]
    assert {"step", "greedy", "draw"} < {one.name for one in plan.functions if one.readable}
    assert max(one.scratch_bytes for one in plan.functions) < 64 * 2**20
    assert plan.weights + plan.pages + plan.scratch <= plan.budget
    assert plan.context_tokens == (plan.num_pages - 1) * plan.page_size > 0
    assert [step.sequences for step in plan.decode] == [1, 4, 16]
    assert all(step.bytes_needed < step.bytes_read for step in plan.decode)
    assert [(step.sequences, step.drafts) for step in plan.verified] == [(1, 4)]
    if name != "Mixtral-8x7B":  # of experts more tokens choose more
        assert plan.verified[0].bytes_read < 1.1 * plan.decode[0].bytes_read


@pytest.mark.usefixtures("_libtpu")
def test_a_model_that_does_not_fit_is_refused_before_anything_is_compiled(capsys):
    """With the exit code of a configuration error."""
    assert main(["plan", str(CONFIGS / "Llama-3-70B.json"), "--topology", "v5e:2x4"]) == 78

    assert "it does not fit on 8 chips: " in capsys.readouterr().err


@pytest.mark.usefixtures("_libtpu")
def test_more_chips_than_there_are_are_refused(capsys):
    """By the setting's name."""
    assert main(["plan", str(CONFIGS / "Qwen3-8B.json"), "--topology", "v5e:2x4", "--tp", "16"]) == 78

    assert "tensor_parallel_size 16 is more than the 8 chips of the topology: lower it" in capsys.readouterr().err


@pytest.mark.usefixtures("_libtpu")
def test_a_topology_that_is_none_is_refused(capsys):
    """With libtpu's words."""
    assert main(["plan", str(CONFIGS / "Qwen3-8B.json"), "--topology", "v5e:3x5"]) == 78

    assert "libtpu cannot compile for 'v5e:3x5'; names are like v5e:2x4 (" in capsys.readouterr().err
