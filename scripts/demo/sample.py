"""What a model in training says: greedy continuations without a cache, and how many sums come out right."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from transformers import PreTrainedTokenizerFast

from engine.models.decoder import Decoder
from scripts.demo.attention import hidden_of_rows
from scripts.demo.sums import Sum


@partial(jax.jit, static_argnums=0)
def _next_tokens(graph: nnx.GraphDef[Decoder], params: nnx.State[Any, Any], ids: Array, lengths: Array) -> Array:
    """The likeliest token after the first ``lengths`` i32[rows] of i32[rows, length] ids."""
    model = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = hidden_of_rows(model, ids, positions, jnp.zeros_like(ids))
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    return model.logits(last).argmax(axis=-1)


def continue_greedily(model: Decoder, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """What follows each prompt, until the model ends it or prompt and answer are ``length`` tokens long."""
    graph, params = nnx.split(model)
    eos = model.partition.model.eos_token_ids[0]
    ids = np.zeros((len(prompts), length), np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    going = lengths < length
    while going.any():
        chosen = np.asarray(_next_tokens(graph, params, ids, lengths))
        going &= chosen != eos
        ids[going, lengths[going]] = chosen[going]
        lengths += going
        going &= lengths < length
    return [list(map(int, row[len(prompt) : end])) for row, prompt, end in zip(ids, prompts, lengths, strict=True)]


def tell(model: Decoder, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt and what the model makes of it."""
    (answer,) = continue_greedily(model, [tokenizer.encode(prompt)], length=256)
    return prompt + str(tokenizer.decode(answer))


def sums_right(model: Decoder, tokenizer: PreTrainedTokenizerFast, operator: str, top: int = 20) -> float:
    """The share of all sums of two numbers from 0 to ``top`` that are answered right."""
    sums = [Sum(a, operator, b) for a in range(top + 1) for b in range(top + 1)]
    asked = [[{"role": "user", "content": f"What is {s.a} {s.operator} {s.b}?"}] for s in sums]
    prompts = [str(tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)) for m in asked]
    answers = tokenizer.batch_decode(
        continue_greedily(model, [tokenizer.encode(prompt) for prompt in prompts], length=36)
    )
    return sum(answer == s.answer for answer, s in zip(answers, sums, strict=True)) / len(sums)
