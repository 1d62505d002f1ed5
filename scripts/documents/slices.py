"""The table of well-known checkpoints and the smallest slices that hold them, by ``odriver plan``'s arithmetic."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from caching.tpu.tpu_chip import CHIPS, Chip
from engine.config import EngineConfig
from engine.models.model_config import read_config_file
from engine.models.partition import most_devices, split
from engine.models.spec import ModelSpec
from engine.planner.chip_fit import ChipFit
from scripts.documents.pages import ROOT

CONFIGS = sorted((ROOT / "tests" / "configs").glob("*.json"), key=lambda path: path.stem.lower())
SLICES = (1, 4, 8, 16, 32, 64, 128, 256)
"""Chips of the slices of v5e and v6e that can be had."""
ROWS, TOKENS = 64, 1024
"""A slice holds a model if so many sequences of so many tokens fit beside its weights."""


KINDS = {"v5e": CHIPS["TPU v5 lite"], "v6e": CHIPS["TPU v6 lite"]}
FORMS = (None, "int8", "int4")
"""Of the weights, as ``--quantization`` has them."""


def table() -> str:
    """A row for each config.json of ``tests/configs``: chips by kind and by form of the weights."""
    heads = [f"{kind}, {form or 'bfloat16'}" for kind in KINDS for form in FORMS]
    rows = [f"| | weights | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    return "\n".join([*rows, *map(_row, CONFIGS)]) + "\n"


def _row(path: Path) -> str:
    model = read_config_file(path)
    cells = [_smallest(model, chip, form) for chip in KINDS.values() for form in FORMS]
    whole = _fit(model, 1, KINDS["v6e"], None).footprint.weight_bytes // 2
    return f"| {path.stem} | {whole / 1e9:.3g} billion | {' | '.join(cells)} |"


def _smallest(model: ModelSpec, chip: Chip, form: str | None) -> str:
    """Chips of the smallest slice, and how many of them are used if not all are."""
    for chips in SLICES:
        used = most_devices(model, chips)
        fit = _fit(model, used, chip, form)
        planner = fit.planner()
        pages = ROWS * planner.groups.pages_of(TOKENS) + 1
        cache = pages * fit.footprint.one_page.bytes_per_page + planner.running_states_bytes
        if fit.footprint.weight_bytes + planner.reserved + cache <= fit.budget:
            return f"{chips}" if used == chips else f"{chips}, {used} used"
    return f"more than {SLICES[-1]}"


def _fit(model: ModelSpec, chips: int, chip: Chip, form: str | None) -> ChipFit:
    config = EngineConfig(max_num_seqs=ROWS, max_model_len=4 * TOKENS, quantization=form)
    return ChipFit(config, split(model, chips), chip, np.dtype(jnp.bfloat16))
