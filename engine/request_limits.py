"""The limits of a request's form: how deep, how many, how long. ipc/PROTOCOL.md lists them all.

Whatever reads a message or a body checks it against these numbers before it does any work for it. What depends on the
model (its vocabulary, its context) is checked where the model is known.
"""

MAX_MESSAGE_BYTES = 4 * 2**20
"""The longest message taken: a million token ids fit. What is longer is refused by name."""
MAX_DEPTH = 64
"""Maps and lists within one another, the message itself included; also in JSON that is sent as a string."""
MAX_VALUES = 131_072
"""Values in the fields of a message that may hold anything, keys included and token ids not; maps and lists in JSON.

An empty list is one byte on the wire and 56 here: without this limit, a message would be many times its size.
"""

MAX_REQUEST_ID_LENGTH = 128
MAX_NAME_LENGTH = 128
"""Characters in the name of a parameter, of a switch of the chat template, or of a function."""
MAX_TARGET_LENGTH = 1024
"""Characters in the name of another client's request."""
MAX_NAMES = 256
"""Fields of a message, parameters, switches; each may be there once."""
MAX_MESSAGES = 4096
"""Turns of a conversation."""
MAX_TOOLS = 512
MAX_TOOL_CALLS = 512
"""In one turn."""
MAX_PROMPTS = 1024
"""Completions that one HTTP body may ask for: its prompts times ``n``."""

MAX_N = 64
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
"""Log-probabilities of a prompt in all: its tokens times one more than ``prompt_logprobs``."""
MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 1000
MAX_SALT = 256
MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 4096

MAX_RENDERED_CHARACTERS = 2 * MAX_MESSAGE_BYTES
"""Of a conversation as the chat template has it."""
MAX_TEMPLATE_SECONDS = 1.0
"""Of processor time, for a chat template to render one conversation."""
MAX_ERROR_LENGTH = 500
"""Characters of what anybody is told is wrong: what is quoted may be as long as a message."""
