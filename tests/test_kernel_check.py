"""Kernels are held against their twins before they serve; XLA's operations take the place of those that are wrong."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import build_checkpoint
from kernels_needed import kernels_needed

from caching.attention import cpu_attention
from caching.attention.cpu_attention import CPUAttention
from caching.attention.spec import AttentionSpec
from caching.attention.twin import Heads, largest_error
from caching.attention.xla_attention import XLAAttention
from caching.metadata import PagedAttentionCacheMetaData
from caching.tpu.pallas_attention import PallasAttention
from caching.tpu.tpu_chip import CHIPS
from caching.tpu.tpu_kernels import PALLAS
from engine import served_model as served_model_module
from engine.build import build_engine
from engine.config import EngineConfig
from engine.models.cpu.rows import CPU_ROWS, CPURows
from engine.models.layers.row_operations import XLA_ROWS
from engine.models.weights import panels
from engine.models.weights.int4 import Int4Experts
from engine.models.weights.weight_format import Layout
from engine.sampling.cpu_sampler import CPU_SAMPLING
from engine.sampling.operations import XLA_SAMPLING
from engine.served_model import served_model
from engine.step import backend_choice
from engine.step.backend_choice import xla_backend
from engine.step.compilation import num_compilations
from engine.step.kernel_checks import checked_backend, product_faults, sampling_faults
from engine.step.kernel_checks.product_faults import experts_fault, product_fault
from engine.step.kernel_checks.row_faults import rows_fault
from engine.step.kernel_checks.sampling_faults import sampling_fault
from engine.step.kernel_checks.tolerance import EXACT, ROUNDED

FLOAT32, BFLOAT16, INT8 = np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.int8)
HEADS = Heads(4, 2, 16, FLOAT32)
SPECS = (AttentionSpec(0.25), AttentionSpec(0.3, window=5, soft_cap=9.0), AttentionSpec(0.25, window=4096))


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    """The CPU's kernels, without which there is nothing to check."""
    with kernels_needed():
        panels.panel_width()
        cpu_attention.vector_width()


@pytest.fixture
def checks_anew():
    """What was checked before counts neither here nor afterwards."""
    checked_backend.checked.cache_clear()
    yield
    checked_backend.checked.cache_clear()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model whose heads the CPU's kernel reads."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), hidden_size=64, num_hidden_layers=1)


def one_page(kv_dtype=FLOAT32, page_size=16, kv_heads=2, head_dim=16):
    """A layer's pool of one page."""
    return PagedAttentionCacheMetaData(
        num_layers=1, num_pages=1, page_size=page_size, num_kv_heads=kv_heads, head_dim=head_dim, dtype=kv_dtype
    )


def error_of(kernel, spec=SPECS[0], kv_dtype=FLOAT32, heads=HEADS):
    """A kernel's over the CPU's pages."""
    return largest_error(kernel, cpu_attention.allocate, one_page(kv_dtype), spec, heads)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kv_dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_cpu_kernel_is_its_twin(spec, kv_dtype, sinks):
    """In windows, capped, with sinks, and with pages in fewer bits."""
    assert error_of(CPUAttention(), spec, kv_dtype, replace(HEADS, sinks=sinks)) < (
        EXACT if kv_dtype == FLOAT32 else ROUNDED / 2
    )


@pytest.mark.parametrize("kv_dtype", [pytest.param(FLOAT32, marks=pytest.mark.thorough), INT8])
def test_xla_s_attention_is_its_twin(kv_dtype):
    """Also with pages that have a scale for each token."""
    kernel = XLAAttention(kv_dtype)
    page = xla_backend(kv_dtype).stored_heads(2, 16, kv_dtype)

    error = largest_error(kernel, xla_backend(kv_dtype).allocate, one_page(kv_dtype, 16, *page), SPECS[1], HEADS)

    assert error < EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SPECS[:2])
def test_our_tpu_kernel_is_its_twin(spec):
    """In Pallas' interpreter, in the TPU's dtypes."""
    kernel = PallasAttention(CHIPS["TPU v5 lite"], interpret=True)
    page = one_page(BFLOAT16, 16, *PALLAS.stored_heads(2, 16, BFLOAT16))

    assert largest_error(kernel, PALLAS.allocate, page, spec, replace(HEADS, dtype=BFLOAT16)) < ROUNDED / 2


@dataclass(frozen=True)
class WrongAttention:
    """The CPU's kernel with a fault."""

    fault: str = "scale"
    fuses_rotation: ClassVar[bool] = True

    def __call__(self, spec: AttentionSpec, view: Any, inputs: Any) -> Any:
        """See AttentionKernel."""
        table = view.table
        if self.fault == "raises":
            raise NotImplementedError("no such instruction\nat all")
        if self.fault == "sinks":
            inputs = replace(inputs, sinks=None)
        elif self.fault == "scale":
            spec = replace(spec, scale=1.02 * spec.scale)
        elif self.fault == "window":
            spec = replace(spec, window=2**20)
        elif self.fault == "a key too few":
            spec = replace(spec, window=(spec.window or 2**20) - 1)
        elif self.fault == "cap":
            spec = replace(spec, soft_cap=None)
        elif self.fault == "another row's page":
            view = replace(view, table=replace(table, page_indices=table.page_indices.at[0, 1].set(2)))
        pages, out = CPUAttention()(spec, view, inputs)
        if self.fault == "unwritten":
            pages = view.pages
        if self.fault == "unwritten when decoding":
            pages = jnp.where(table.cu_q_lens[1] == 1, view.pages, pages)
        if self.fault == "NaN":
            out = out.at[0, 0, 0].set(jnp.nan)
        return pages, out


FAULTS = (
    "scale",
    "window",
    "a key too few",
    "cap",
    "another row's page",
    "unwritten",
    "unwritten when decoding",
    "NaN",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found_out(fault):
    """Whatever it does wrong: what it scores, which keys it sees, what it writes."""
    error = error_of(WrongAttention(fault), SPECS[1])

    assert error > (EXACT if fault == "scale" else 2 * ROUNDED)


def serve(directory, **settings):
    """The smallest model as it is served."""
    return served_model(
        EngineConfig(model=directory, max_num_seqs=1, max_num_batched_tokens=1, num_pages=4, **settings)
    )


@pytest.mark.usefixtures("checks_anew")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("unwritten", "its results differ from plain attention's by"),
        ("raises", "it fails (NotImplementedError: no such instruction)"),
    ],
)
def test_a_wrong_kernel_is_replaced_by_xla(directory, monkeypatch, caplog, fault, why):
    """Loudly: in the log, in what the daemon says of itself, and as a number in its status."""
    monkeypatch.setattr(backend_choice, "CPUAttention", lambda: WrongAttention(fault))

    served = serve(directory)

    assert served.backend.attention == XLAAttention(FLOAT32)
    assert served.backend.layout is Layout.PANELS  # the matrix product is right
    assert served.backend.replaced == ("attention",)
    assert "in the place of oDriver's CPU kernels: it" in served.describe()["operations"]
    (record,) = (record for record in caplog.records if "IS REPLACED" in record.getMessage())
    assert record.levelname == "ERROR" and why in record.getMessage() and "ATTENTION" in record.getMessage()


@pytest.mark.thorough
@pytest.mark.usefixtures("checks_anew")
def test_an_engine_says_how_many_kernels_it_does_without(directory, monkeypatch):
    """And serves."""
    monkeypatch.setattr(backend_choice, "CPUAttention", WrongAttention)
    settings = EngineConfig(model=directory, max_num_seqs=1, max_num_batched_tokens=1, num_pages=4, max_model_len=32)

    assert build_engine(settings, lambda progress: None).stats().replaced_kernels == 1


@pytest.mark.usefixtures("checks_anew")
def test_right_kernels_are_kept(directory):
    """And nothing is said."""
    served = serve(directory)

    assert served.backend.attention == CPUAttention() and served.backend.replaced == ()


@pytest.mark.parametrize("quantization", ["int8", "int4", None])
def test_it_is_said_whether_quantised_weights_are_multiplied_by_vnni(directory, quantization):
    """Where the processor has it; nothing of it where weights are floats, or of what XLA multiplies."""
    served = serve(directory, quantization=quantization)
    by_xla = replace(served, backend=xla_backend(FLOAT32))

    by_vnni = quantization is not None and panels.inputs_together(8) == 4
    assert ("by VNNI" in served.describe()["operations"]) is by_vnni
    assert "VNNI" not in by_xla.describe()["operations"]


@pytest.mark.usefixtures("checks_anew")
def test_a_wrong_matrix_product_is_replaced_by_xla(directory, monkeypatch):
    """Weights are then laid out for XLA, and attention stays."""
    right = panels.product
    monkeypatch.setattr(panels, "product", lambda x, *rest: right(x, *rest).at[0, -1].add(0.01))

    served = serve(directory)

    assert "products with float32 differ from numpy's by 0.01" in (product_fault() or "")
    assert (served.backend.layout, served.backend.attention) == (Layout.AXES, CPUAttention())
    assert served.backend.replaced == ("matrix product",) and not served.backend.skips_padding


def test_a_check_makes_one_program_of_each_kernel():
    """Every start makes them: what is beside the kernel is numpy's. Attention's has two, of inputs apart and in one array, and
    so has sampling, of what changes logits and what draws from them."""
    before = num_compilations()

    assert error_of(CPUAttention(), AttentionSpec(0.27)) < EXACT
    assert [product_fault(), rows_fault(), sampling_fault()] == [None] * 3

    assert num_compilations() == before + 6


@pytest.mark.parametrize("wrong", range(3))
def test_no_number_is_a_fault_in_whichever_product(monkeypatch, wrong):
    """Of all rows, of one alone, or of experts'."""
    right = product_faults._products

    def products(*given):
        results = list(right(*given))
        results[wrong] = results[wrong].at[0, 0].set(jnp.nan)
        return tuple(results)

    monkeypatch.setattr(product_faults, "_products", products)

    assert "products with float32 differ from numpy's by nan" in (product_fault() or "")


@pytest.mark.usefixtures("checks_anew")
@pytest.mark.parametrize("wrong", ["normed", "gated", "added"])
def test_norms_that_are_wrong_are_replaced_by_xla(directory, monkeypatch, wrong):
    """As are gates and additions; products and attention stay."""
    right = getattr(CPURows, wrong)
    monkeypatch.setattr(CPURows, wrong, lambda *given, **named: right(*given, **named).at[..., -1].add(0.01))

    backend = serve(directory).backend

    assert "differs from numpy's by 0.01" in backend.description
    assert (backend.rows, backend.layout, backend.attention) == (XLA_ROWS, Layout.PANELS, CPUAttention())
    assert backend.replaced == ("norm",)


@pytest.mark.usefixtures("checks_anew")
@pytest.mark.parametrize("wrong", ["bias", "penalties", "mask", "count of tokens", "draw"])
def test_changes_of_logits_that_are_wrong_are_left_to_xla(directory, monkeypatch, wrong):
    """As is all between logits and tokens then."""
    names = {"bias": "apply_bias", "mask": "mask_logits", "draw": "draw"}
    name = names.get(wrong, "apply_penalties")
    right = getattr(CPU_SAMPLING, name)

    def change(*given):
        if name == "mask_logits":
            return right(*given).at[0, -1].add(0.01)
        state, logits = right(*given)
        if name == "draw":  # of tokens, and the last ones
            return state.at[0].add(1), logits
        if wrong == "count of tokens":
            return replace(state, counts=state.counts.at[0, 0].add(1)), logits
        return state, logits.at[0, -2].add(0.01)

    monkeypatch.setattr(sampling_faults, "CPU_SAMPLING", replace(CPU_SAMPLING, **{name: change}))

    backend = serve(directory).backend

    assert f"by XLA: {wrong} differs from numpy's by" in backend.description
    assert (backend.sampling, backend.rows, backend.replaced) == (XLA_SAMPLING, CPU_ROWS, ("sampling",))


@pytest.mark.usefixtures("checks_anew")
@pytest.mark.parametrize("has_sinks", [True, False])
def test_a_model_with_sinks_has_them_in_its_trial(directory, tmp_path, monkeypatch, has_sinks):
    """A kernel that leaves them out serves those without."""
    monkeypatch.setattr(backend_choice, "CPUAttention", lambda: WrongAttention("sinks"))
    model = build_checkpoint(tmp_path, "gpt_oss") if has_sinks else directory

    assert serve(model).backend.replaced == (("attention",) if has_sinks else ())


@pytest.mark.usefixtures("checks_anew")
def test_a_fault_on_one_host_holds_for_all(directory, monkeypatch):
    """They must run the same program."""
    monkeypatch.setattr(checked_backend, "least_of_all", lambda number: 0)

    assert "it is at fault on another host" in serve(directory).describe()["operations"]


@pytest.mark.usefixtures("checks_anew")
@pytest.mark.parametrize(
    ("quantization", "words"), [("int4", "tables and experts in int8"), ("int8", "weights in int8")]
)
def test_experts_are_in_8_bits_if_their_product_in_4_is_wrong(tmp_path, monkeypatch, quantization, words):
    """Of a mixture that is served in 4 bits on a TPU, of which this machine plays the part."""
    assert experts_fault() is None
    product = Int4Experts.grouped_product
    monkeypatch.setattr(Int4Experts, "grouped_product", lambda *arguments: 1.01 * product(*arguments))
    monkeypatch.setattr(
        served_model_module, "choose_backend", lambda *_, **__: replace(xla_backend(FLOAT32), layout=Layout.MATRIX)
    )
    directory = build_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64)

    served = serve(directory, quantization=quantization, page_size=16)

    is_replaced = quantization == "int4"
    assert ("products differ from numpy's by" in (experts_fault() or "")) and words in served.describe()["dtype"]
    assert served.backend.replaced == ("int4 experts",) * is_replaced
    assert ("experts in 8 bits: products differ" in served.describe()["operations"]) is is_replaced
