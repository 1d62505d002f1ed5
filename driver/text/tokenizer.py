"""Text to token ids and back, by the tokenizer files of a model directory."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from driver.errors import ContextLengthExceeded, InvalidRequest
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest, Usage
from driver.text.chat_template import hold_to_budget, processor_template, read_template, rendered
from driver.text.conversation import Chat, check_encodable, checked_chat
from driver.text.least_tokens import LeastTokens
from driver.text.token_bytes import token_bytes
from driver.text.tokenizer_files import loadable
from driver.text.transformers_modules import transformers_module
from engine.errors import ConfigurationError
from engine.hub.small_files import TOKENIZER
from engine.request_limits import ServingLimits

SLACK = 8
"""Times the model's context that a prompt may have which is to be cut: all of it is tokenised."""
MAX_UNINTERRUPTED = 1024
"""Up to so many tokens are decoded with the interpreter's lock held, for under 1 ms."""


class HuggingFaceTokenizer:
    """A fast tokenizer of transformers, from a local directory. For any thread.

    A ``chat_template`` takes the place of its own. Raises ConfigurationError for unusable files.
    It uses the Rust backend, which encodes and decodes on any thread as long as none changes its
    settings; transformers' own ``encode`` sets truncation and padding at each call.
    """

    def __init__(self, directory: Path, chat_template: Path | None = None) -> None:
        self._tokenizer = _load(directory)
        if chat_template is not None:
            self._tokenizer.chat_template = read_template(chat_template)
        elif self._tokenizer.chat_template is None:
            self._tokenizer.chat_template = processor_template(directory)
        _check_templates(self._tokenizer.chat_template or "", directory)
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        definition = self.definition()
        self._least_tokens = LeastTokens(definition)
        facts = hashlib.blake2b(definition.encode(), digest_size=8)
        facts.update(repr(self.info()).encode())
        self.fingerprint = facts.hexdigest()
        """What it shares with tokenizers of the same ids, texts and chat template."""
        hold_to_budget(self._tokenizer)
        before = self.encode_word("a")
        self._before = before, self.decode(before, skip_special_tokens=False)
        """Ids behind which a token has its text as it is in the middle of one, and their text."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Its end token, if it has one."""
        token_id = self._tokenizer.eos_token_id
        return () if token_id is None else (int(token_id),)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model expects around one."""
        return self._ids(text, add_special_tokens=True)

    def encode_word(self, text: str) -> list[int]:
        """The ids of a piece of text, with no special tokens around it."""
        return self._ids(text, add_special_tokens=False)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of ``encode_word``, or 0, for much less work."""
        return self._least_tokens.at_least(text)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a batch of one text: unlike ``encode`` that releases the interpreter's lock."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def render(self, chat: Chat) -> str:
        """A conversation as text for ``encode_word``, by the template; raises InvalidRequest."""
        return rendered(self._tokenizer, chat)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, with special tokens left out or as they are spelt, and U+FFFD for
        bytes that are no UTF-8.

        It omits the clean-up of spaces that transformers may add, which would look ahead.
        """
        if len(token_ids) > MAX_UNINTERRUPTED:
            return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def text_of(self, token_id: int) -> str:
        """The text that a token adds to one before it.

        By itself it may be another: many tokenizers drop the space in front of the first word.
        """
        before, before_text = self._before
        text = self.decode([*before, token_id], skip_special_tokens=False)
        if not text.startswith(before_text):
            return self.decode([token_id], skip_special_tokens=False)
        return text[len(before_text) :]

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token that is only a part of a character; None if they are not known."""
        return token_bytes(self._backend.id_to_token(token_id) or "")

    def has_id(self, token_id: int) -> bool:
        """Whether one of its tokens has the id: a model may have more ids."""
        return self._backend.id_to_token(token_id) is not None

    def is_visible(self, token_id: int) -> bool:
        """Whether the id has text: special and unassigned ids have none."""
        return token_id not in self._special and self.has_id(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is that of a special token, which can be spelt but is no text."""
        return token_id in self._special

    def definition(self) -> str:
        """The JSON of a tokenizer.json, with the tokens that other files add."""
        return str(self._backend.to_str())

    def different_token(self, other: "HuggingFaceTokenizer") -> tuple[int, str, str] | None:
        """The first id that is another token to ``other``, with ours and theirs; None without one.

        Ids that only one of them has do not count.
        """
        ours, theirs = (
            {number: token for token, number in each._backend.get_vocab().items()} for each in (self, other)
        )
        different = (number for number in ours if number in theirs and theirs[number] != ours[number])
        first = min(different, default=None)
        return None if first is None else (first, ours[first], theirs[first])

    def info(self) -> dict[str, Any]:
        """Class, special tokens and chat template, by the names of tokenizer_config.json."""
        tokenizer = self._tokenizer
        named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        special = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(self._special)]
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            **named,
            "additional_special_tokens": [token for token in special if token not in named.values()],
        }


def _load(directory: Path) -> Any:
    # At import transformers would warn that PyTorch is missing, which we never use.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Our batches have one text; threads for more would be warned of at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with loadable(directory) as files:
            tokenizer = _class_for(files).from_pretrained(files, local_files_only=True, trust_remote_code=False)
    except ConfigurationError:
        raise
    # the tokenizers library raises bare Exception for a file it can't read
    except Exception as error:
        raise ConfigurationError(f"the tokenizer files in {directory} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigurationError(f"{directory} holds a slow tokenizer: convert it to a tokenizer.json first")
    return tokenizer


def _class_for(files: Path) -> Any:
    """The class of transformers that takes the files as they are.

    Of a tokenizer.json a model's own class (GPT2Tokenizer, Qwen2Tokenizer, LlamaTokenizer) would
    take vocabulary and merges alone, and normalise and cut words in its own way.
    """
    if (files / TOKENIZER).is_file():
        return transformers_module("tokenization_utils_tokenizers").PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _check_templates(templates: Any, directory: Path) -> None:
    """Raises ConfigurationError unless each is a text."""
    if not all(isinstance(one, str) for one in (templates.values() if isinstance(templates, dict) else [templates])):
        raise ConfigurationError(f"{directory} has a chat_template that is no text: give one with --chat-template FILE")


def answer_tokenizer(request: TokenizerRequest, tokenizer: HuggingFaceTokenizer, limits: ServingLimits) -> ReturnSample:
    """The answer to a tokenizer request; raises InvalidRequest."""
    given = [request.prompt, request.messages, request.token_ids]
    if sum(value is not None for value in given) != 1:
        raise InvalidRequest("a tokenizer is given a prompt, messages or token_ids: exactly one of them")
    text, token_ids = "", request.token_ids
    if token_ids is not None:
        check_fits("token_ids", len(token_ids), limits.max_model_len)
        check_in_vocabulary("token_ids", token_ids, limits.vocab_size)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    else:
        encode = tokenizer.encode if request.add_special_tokens else tokenizer.encode_word
        token_ids = prompt_token_ids(request, encode, tokenizer, limits.max_model_len, request.truncate_prompt_tokens)
    return ReturnSample(
        request_id=request.request_id,
        text=text,
        token_ids=[] if text else token_ids,
        finish_reason="stop",
        usage=Usage(len(token_ids), 0),
    )


def prompt_token_ids(
    request: ActiveRequest | TokenizerRequest,
    encode: Callable[[str], list[int]],
    tokenizer: HuggingFaceTokenizer,
    most: int,
    kept: int | None = None,
) -> list[int]:
    """The ids of a request's prompt or conversation, the last ``kept`` if it is to be cut; raises
    InvalidRequest.

    ``most`` is for the rendered conversation: a template may leave messages out. A prompt that is
    to be cut may have SLACK times as many.
    """
    token_ids = _whole_prompt(request, encode, tokenizer, most, 1 if kept is None else SLACK)
    return token_ids if kept is None else token_ids[-kept:]


def _whole_prompt(
    request: ActiveRequest | TokenizerRequest,
    encode: Callable[[str], list[int]],
    tokenizer: HuggingFaceTokenizer,
    most: int,
    slack: int,
) -> list[int]:
    if request.messages is not None:
        chat = checked_chat(request.messages, request.tools, request.chat_template_kwargs)
        return _text_token_ids(tokenizer.render(chat), tokenizer.encode_word, tokenizer, most, slack)
    if request.tools or request.chat_template_kwargs:
        raise InvalidRequest("tools and chat_template_kwargs are for the chat template: send messages")
    if isinstance(request.prompt, list):
        check_fits("the prompt", len(request.prompt), most, slack)
        return list(request.prompt)
    if not isinstance(request.prompt, str):
        raise InvalidRequest(f"prompt must be a string or a list of token ids, not {type(request.prompt).__name__}")
    return _text_token_ids(request.prompt, encode, tokenizer, most, slack)


def _text_token_ids(
    text: str, encode: Callable[[str], list[int]], tokenizer: HuggingFaceTokenizer, most: int, slack: int
) -> list[int]:
    """The ids of a prompt's text; refuses one that ``check_fits`` refuses before it is tokenised."""
    check_encodable("the prompt", text)
    check_fits("the prompt", tokenizer.least_tokens(text), most, slack, "at least ")
    return encode(text)


def check_fits(what: str, num_tokens: int, most: int, slack: int = 1, about: str = "") -> None:
    """Raises ContextLengthExceeded for more than ``slack`` times ``most`` tokens."""
    if num_tokens > slack * most:
        raise ContextLengthExceeded(most, f"{what} has {about}{num_tokens} tokens", "shorten it")


def check_in_vocabulary(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first value that is no token id."""
    if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}[{position}] must be a token id from 0 to {vocab_size - 1}, not {token_id!r}")
