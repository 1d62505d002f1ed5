"""Limits on the form of a request: depth, counts and lengths. ipc/PROTOCOL.md lists them all.

A message or body is checked against these numbers before any work is done for it. Limits of
the model (its vocabulary, its context) are checked where the model is known.
"""

from typing import Any

import msgspec

from engine.errors import ConfigurationError

MAX_MESSAGE_BYTES = 4 * 2**20
"""The largest message accepted, enough for a million token ids. A larger one is an error."""
MAX_DEPTH = 64
"""Nesting of maps and lists, the message included; also in JSON that is sent as a string."""
MAX_VALUES = 131_072
"""Values in a message's untyped fields: keys count, token ids do not. In JSON, maps and lists.

An empty list is 1 byte on the wire and 56 in memory. The limit bounds that growth.
"""

MAX_REQUEST_ID_LENGTH = 128
MAX_NAME_LENGTH = 128
"""Characters in the name of a parameter, of a switch of the chat template, or of a function."""
MAX_TARGET_LENGTH = 1024
"""Characters in the name of another client's request."""
MAX_MODEL_LENGTH = 256
"""Characters in the name of a model, or of an adapter."""
MAX_PATH_LENGTH = 1024
"""Characters in the path of an adapter."""
MAX_NAMES = 256
"""Fields of a message, parameters, switches; each may appear once."""
MAX_MESSAGES = 4096
"""Turns of a conversation."""
MAX_TOOLS = 512
MAX_TENSORS, MAX_TENSOR_NAME_LENGTH = 2**20, 512
"""Of a checkpoint."""
MAX_TOOL_CALLS = 512
"""In one message of a conversation."""
MAX_PROMPTS = 1024
"""Completions in one HTTP body: its prompts times ``n``."""

MAX_N = 64
MAX_RESUMED_TOKENS = 2**19
"""Token ids of an earlier output, of all samples together: they are read as text again, in half a
minute at most."""
MAX_SEED = 2**32 - 1
MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 86400.0
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 16
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of a whole prompt: its tokens times (``prompt_logprobs`` + 1)."""
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1000
MAX_SPECULATIVE_TOKENS = 32
"""Drafts of one sequence in a step."""
MAX_SALT = 256
MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 4096

MAX_RENDERED_CHARACTERS = 2 * MAX_MESSAGE_BYTES
"""Characters of a conversation that the chat template has rendered."""
MAX_TEMPLATE_SECONDS = 1.0
"""CPU time of a chat template that renders one conversation."""
MAX_ERROR_LENGTH = 500
"""Characters of an error message. What it quotes may be as long as a message."""
MOST_EOS_TOKEN_IDS = 32
"""Ids that may end a model's output; known models have less than a quarter as many."""


class ServingLimits(msgspec.Struct, frozen=True):
    """What a request is checked against, and filled up with, before it becomes a Sequence."""

    max_model_len: int
    """Tokens of prompt and output together: the model's, the operator's or the pool's limit."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int | None = None
    """Tokens in a page, the block size of prefix hashes; None without prefix caching."""
    default_sampling_params: dict[str, Any] = {}
    """The model's own values of SamplingParams, for requests that leave them out.

    ``max_tokens`` among them is a limit of every request, as in vLLM.
    """
    max_num_seqs: int = 1
    """Sequences that run at once."""
    num_speculative_tokens: int = 0
    """Drafts that a sequence has in a step at most."""
    prompt_lookup: tuple[int, int] | None = None
    """The fewest and the most tokens of the n-grams that are its drafts; None with other drafts."""

    def __post_init__(self) -> None:
        count = len(self.eos_token_ids)
        if count > MOST_EOS_TOKEN_IDS:
            raise ConfigurationError(f"the model has {count} end tokens, and {MOST_EOS_TOKEN_IDS} are most")
