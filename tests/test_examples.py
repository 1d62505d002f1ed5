"""scripts/examples: what the trainers compute, and what they do with a live daemon."""

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
from xla_flags import xla_flags

from engine.hub.names import DEMO_MODEL
from scripts.demo.cast import HOMES
from scripts.examples import policy_gradient, train_lora
from scripts.examples.lora import ALPHA, EVERY_PROJECTION, RANK, changed, new_lora, save_adapter
from scripts.examples.policy import group_advantages, reward
from scripts.examples.trainable import Trainable

ROOT = Path(__file__).parent.parent


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One day, she found her red kite.", 1.0),
        ('"Her!" said Tom.', 1.0),
        ("She saw him.", 0.0),
        ("A fox lived here, where the other heroes are.", 0.0),
        ("", 0.0),
    ],
)
def test_a_text_of_her_alone_is_rewarded(text: str, expected: float) -> None:
    """By whole words, however they begin."""
    assert reward(text) == expected


def test_advantages_are_of_the_group() -> None:
    """A group's mean is 0, its deviation 1, and one whose samples are all alike teaches nothing."""
    rewards = np.array([1, 0, 1, 1, 0, 0], np.float32)

    advantages = group_advantages(rewards, np.array([0, 0, 1, 1, 2, 2]))

    assert advantages.tolist() == [1, -1, 0, 0, 0, 0]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that the examples start are those of this tree, and have one device."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", xla_flags())


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


@pytest.mark.thorough
@pytest.mark.usefixtures("optimizer", "commands")
def test_the_reward_rises_with_the_adapter_of_each_step(tmp_path: Path) -> None:
    """The daemon's log-probabilities are those of this step's adapter, and not of the one before."""
    outcomes = policy_gradient.main(["--adapter-root", str(tmp_path), "--own-daemon"])

    rewards = [outcome.reward for outcome in outcomes]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6
    assert max(outcome.difference for outcome in outcomes) < 1e-3
    assert min(outcome.difference_before for outcome in outcomes[1:]) > 0.1


@pytest.mark.thorough
@pytest.mark.usefixtures("optimizer", "commands")
def test_the_weights_of_each_step_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's log-probabilities are those of this step's weights, and not of those before."""
    monkeypatch.setattr(policy_gradient, "STEPS", 3)

    outcomes = policy_gradient.main(["--weights", "--own-daemon"])

    assert max(outcome.difference for outcome in outcomes) < 1e-3
    assert min(outcome.difference_before for outcome in outcomes[1:]) > 0.1
