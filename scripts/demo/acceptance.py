"""How many of the shipped model's tokens a draft model knows before: by kind of text, greedy and drawn.

    python -m scripts.demo.acceptance engine/models/demo_draft --samples 24

The engine lets the shipped model answer prompts that no training has read. Then the draft model reads the answers and
draws a token at each place with the sampler and the random numbers that the engine has for that place.
"""

import argparse
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.build import build_engine
from engine.config import EngineConfig
from engine.hub.names import DEMO_MODEL
from engine.models.decoder import Decoder
from engine.oengine import oEngine
from engine.sampling.sampler import SamplingRows, sample
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from scripts.demo.attention import hidden_of_rows
from scripts.demo.chat import Message, ask_for_story, draw_conversation
from scripts.demo.draft_model import load_model
from scripts.demo.stories import tell_story
from scripts.demo.sums import draw_sum

SEED = 7
MAX_TOKENS = 160
BEGINNING = 12
"""Words of a story that are given."""
TEMPERATURES = (0.0, 0.2, 0.7, 1.0)
DRAFTS = (2, 3, 4, 6, 8)
_LENGTHS = 128
"""Rows are padded to a multiple of so many tokens."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it, with the parameters of both."""

    ids: list[int]
    num_prompt_tokens: int
    temperature: float
    seed: int


def _told(rng: Random) -> str:
    return " ".join(tell_story(rng).split()[:BEGINNING])


def _chat(rng: Random) -> list[Message]:
    """A conversation up to a question; a fourth of them end in a request for a story."""
    messages = draw_conversation(rng, exchanges=rng.choice((1, 2, 4)), story_share=0.0)[:-1]
    return [*messages[:-1], {"role": "user", "content": ask_for_story(rng)[0]}] if rng.random() < 0.25 else messages


def _sum(rng: Random) -> list[Message]:
    return [{"role": "user", "content": draw_sum(rng).question(rng)}]


KINDS: dict[str, Callable[[Random], str | list[Message]]] = {"stories": _told, "chat": _chat, "sums": _sum}


def prompts(kind: str, tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    """So many prompts of a kind."""
    rng = Random(f"{SEED} {kind}")
    drawn = [KINDS[kind](rng) for _ in range(count)]
    texts = [
        one if isinstance(one, str) else tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in drawn
    ]
    return [tokenizer.encode(str(text)) for text in texts]


def answer(engine: oEngine, prompts: ListOf[list[int]], temperature: float) -> list[Text]:
    """What the engine's model says. A prompt's number is its seed."""
    told = {str(number): list(prompt) for number, prompt in enumerate(prompts)}
    for number, prompt in enumerate(prompts):
        params, eos = SamplingParams(temperature=temperature), frozenset(engine.limits.eos_token_ids)
        engine.add(Sequence(str(number), prompt, params, eos, MAX_TOKENS, seed=number))
    while engine.has_work:
        for output in engine.step():
            told[output.request_id] += output.token_ids
    return [Text(told[str(number)], len(prompt), temperature, seed=number) for number, prompt in enumerate(prompts)]


def right_drafts(draft: Decoder, texts: ListOf[Text]) -> Iterator[NDArray[np.bool_]]:
    """For each text, bool[tokens of the answer]: whether the draft model draws that token, all before it being given."""
    graph, params = nnx.split(draft)
    for text in texts:
        ids = np.array(text.ids, np.int32)
        padded = np.pad(ids, (0, -len(ids) % _LENGTHS))
        drawn = _drawn(graph, params, padded, np.float32(text.temperature), np.uint32(text.seed))
        yield np.asarray(drawn)[text.num_prompt_tokens - 1 : len(ids) - 1] == ids[text.num_prompt_tokens :]


@partial(jax.jit, static_argnums=0)
def _drawn(
    graph: nnx.GraphDef[Decoder], params: nnx.State[Any, Any], ids: Array, temperature: Array, seed: Array
) -> Array:
    """i32[length]: the token drawn after each of i32[length] ids."""
    model, length = nnx.merge(graph, params), len(ids)
    places = jnp.arange(length, dtype=jnp.int32)
    hidden = hidden_of_rows(model, ids[None], places[None], jnp.zeros_like(ids)[None])
    whole = partial(jnp.full, length)
    rows = SamplingRows(
        whole(temperature), whole(np.int32(0)), whole(np.float32(1)), whole(np.float32(0)), whole(seed), places + 1
    )
    return sample(model.logits(hidden[0]), rows, jax.random.key(EngineConfig().seed))


def tokens_a_step(right: ListOf[NDArray[np.bool_]], drafts: int) -> float:
    """Of steps that verify so many drafts of a text each."""
    steps = tokens = 0
    for answered in right:
        place = 0
        while place < len(answered):
            ahead = answered[place : place + drafts]
            place += (len(ahead) if ahead.all() else int(np.argmin(ahead))) + 1
            steps += 1
        tokens += len(answered)
    return tokens / steps


def show(directory: Path, samples: int) -> None:
    """Print a line for each kind of text and temperature."""
    tokenizer, draft = AutoTokenizer.from_pretrained(DEMO_MODEL), load_model(directory)
    engine = build_engine(EngineConfig(), lambda _: None)
    columns = ("text", "temperature", "tokens", "right", *(f"{count} drafts" for count in DRAFTS))
    table = Table(*columns, title=f"{samples} answers each; tokens a step by drafts")
    for kind in KINDS:
        for temperature in TEMPERATURES:
            right = list(right_drafts(draft, answer(engine, prompts(kind, tokenizer, samples), temperature)))
            share, gains = np.concatenate(right).mean(), [f"{tokens_a_step(right, count):.2f}" for count in DRAFTS]
            table.add_row(kind, f"{temperature:g}", str(sum(map(len, right))), f"{share:.1%}", *gains)
    Console(width=100).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the draft model")
    parser.add_argument("--samples", type=int, default=24, metavar="N")
    options = parser.parse_args()
    show(options.directory, options.samples)
