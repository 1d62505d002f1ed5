"""Text to token ids and back, by the tokenizer files of a model directory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2

from driver.chat import Chat, check_encodable, check_template
from driver.errors import InvalidRequest
from engine.errors import ConfigurationError


class Tokenizer(Protocol):
    """What the driver asks of a tokenizer; prepare inputs encodes, summary processing decodes."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model expects around one."""

    def encode_word(self, text: str) -> list[int]:
        """The ids of a piece of text, with no special tokens around it."""

    def apply_chat_template(self, chat: Chat) -> list[int]:
        """The ids of a conversation, up to where the assistant speaks; raises InvalidRequest naming the problem."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, special tokens left out or as they are spelt, U+FFFD for bytes that are no UTF-8."""

    def is_visible(self, token_id: int) -> bool:
        """Whether the id takes part in text at all; special and unassigned ones do not."""

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special token's, which can be spelt but is no text."""

    def definition(self) -> str:
        """What a tokenizer.json would say of it."""

    def info(self) -> dict[str, Any]:
        """What a tokenizer_config.json would say of it."""


class HuggingFaceTokenizer:
    """A fast tokenizer of the transformers library, from a local directory."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load(directory)
        self._backend = self._tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt; raises InvalidRequest for text that UTF-8 cannot carry."""
        check_encodable("the prompt", text)
        return list(self._tokenizer.encode(text))

    def encode_word(self, text: str) -> list[int]:
        """The ids of a piece of text; raises InvalidRequest for text that UTF-8 cannot carry."""
        check_encodable("a bad word", text)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def apply_chat_template(self, chat: Chat) -> list[int]:
        """The ids of a conversation; raises InvalidRequest where the template refuses it, or would ignore a part of it."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template: send a prompt instead of messages")
        tools = chat.tools or None
        try:
            check_template(self._tokenizer.get_chat_template(tools=tools), chat)
            token_ids = self._tokenizer.apply_chat_template(
                chat.messages, tools, return_dict=False, **{"add_generation_prompt": True} | chat.template_kwargs
            )
        except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
            # A template is a program, and these messages are its input.
            raise InvalidRequest(f"the chat template of this model refuses these messages: {error}") from error
        return list(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, without the clean-up of spaces that transformers may add: it would look ahead."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def is_visible(self, token_id: int) -> bool:
        """Whether the vocabulary has the id, and not as a special token."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is that of an added token that is marked special."""
        return token_id in self._special

    def definition(self) -> str:
        """What tokenizer.json says, and of the tokens that other files add."""
        return str(self._backend.to_str())

    def info(self) -> dict[str, Any]:
        """Class, special tokens and chat template, by the names of tokenizer_config.json."""
        tokenizer = self._tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
            **{name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
        }


def _load(directory: Path) -> Any:
    if not (directory / "tokenizer.json").is_file():
        raise ConfigurationError(f"{directory} has no tokenizer.json: a model directory needs a fast tokenizer's files")
    # At import transformers would warn that PyTorch is missing, which we never use.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a file it can't read
        raise ConfigurationError(f"the tokenizer files in {directory} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigurationError(f"{directory} holds a slow tokenizer: convert it to a tokenizer.json first")
    return tokenizer
