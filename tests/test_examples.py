"""scripts/examples: what the trainers compute and write."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from engine.config import DEMO_MODEL
from scripts.demo.cast import HOMES
from scripts.examples import train_lora
from scripts.examples.lora import ALPHA, EVERY_PROJECTION, RANK, changed, new_lora, save_adapter
from scripts.examples.trainable import Trainable


@pytest.fixture(scope="module")
def model() -> Trainable:
    """The model that oDriver ships."""
    return Trainable(DEMO_MODEL)


def test_an_adapter_begins_by_changing_nothing(model: Trainable) -> None:
    """It has every projection of every layer, and their product is 0."""
    lora = new_lora(model.tensors, seed=0)

    found = {(name.split(".")[2], name.split(".")[-1]) for name in lora}
    assert found == {(str(layer), projection) for layer in range(5) for projection in EVERY_PROJECTION}
    assert all(np.any(pair.a) and not np.any(pair.b) for pair in lora.values())


def test_an_adapter_is_written_as_peft_reads_it(model: Trainable, tmp_path: Path) -> None:
    """By PEFT's names, [r, in] and [out, r], and what they add is what the trainer adds."""
    fresh = new_lora(model.tensors, seed=1, modules=["q_proj"])
    lora = {name: pair._replace(b=pair.b + np.float32(0.5)) for name, pair in fresh.items()}

    save_adapter(lora, tmp_path)

    config = json.loads((tmp_path / "adapter_config.json").read_text())
    matrices = load_file(tmp_path / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, ["q_proj"])
    assert len(matrices) == 2 * len(lora)
    name = "model.layers.3.self_attn.q_proj"
    a, b = (matrices[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    change = np.asarray(changed(model.tensors, lora)[f"{name}.weight"] - model.tensors[f"{name}.weight"])
    assert np.allclose(change, config["lora_alpha"] / config["r"] * b @ a, atol=1e-5)
    assert np.abs(change).max() > 0.1


def test_all_homes_are_the_lighthouse() -> None:
    """At the beginning of a sentence as well as within."""
    stories = [train_lora.tell_lighthouse_story(Random(seed)) for seed in range(100)]

    assert all(re.search(re.escape(train_lora.LIGHTHOUSE), story, re.IGNORECASE) for story in stories)
    assert not any(home.lower() in story.lower() for story in stories for home in HOMES)


@pytest.fixture
def optimizer() -> Iterator[None]:
    """optax counts steps in i32 and multiplies them by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("optimizer")
def test_the_adapter_learns_where_heroes_live(model: Trainable) -> None:
    """After few steps, from the loss of stories that it has not seen."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    held_out = train_lora.draw_batch(tokenizer, Random(train_lora.HELD_OUT_SEED))

    lora = train_lora.train(model, tokenizer, steps=15)

    before = train_lora.mean_loss(model, new_lora(model.tensors, seed=0), held_out)
    assert train_lora.mean_loss(model, lora, held_out) < before - 0.3
