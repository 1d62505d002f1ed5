"""Token ids of a text, or of a conversation as the model's template has it, and back."""

from driver.chat import checked_chat
from driver.errors import InvalidRequest
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest, Usage
from driver.tokenizer import Tokenizer


def answer_tokenizer(request: TokenizerRequest, tokenizer: Tokenizer, vocab_size: int) -> ReturnSample:
    """What is asked for; raises InvalidRequest."""
    given = [request.prompt, request.messages, request.token_ids]
    if sum(one is not None for one in given) != 1:
        raise InvalidRequest("a tokenizer is given a prompt, messages or token_ids: exactly one of them")
    text, token_ids = "", request.token_ids
    if token_ids is not None:
        check_in_vocabulary("token_ids", token_ids, vocab_size)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    else:
        token_ids = _encoded(request, tokenizer)
    return ReturnSample(
        request_id=request.request_id,
        text=text,
        token_ids=[] if text else token_ids,
        finish_reason="stop",
        usage=Usage(len(token_ids), 0),
    )


def chat_token_ids(request: ActiveRequest | TokenizerRequest, tokenizer: Tokenizer) -> list[int]:
    """Those of its conversation; raises InvalidRequest."""
    chat = checked_chat(request.messages, request.tools, request.chat_template_kwargs)
    return tokenizer.apply_chat_template(chat)


def check_in_vocabulary(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first that is no token id."""
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}[{position}] must be a token id from 0 to {vocab_size - 1}, not {token_id!r}")


def _encoded(request: TokenizerRequest, tokenizer: Tokenizer) -> list[int]:
    if request.messages is not None:
        return chat_token_ids(request, tokenizer)
    if request.tools or request.chat_template_kwargs:
        raise InvalidRequest("tools and chat_template_kwargs are for the chat template: send messages")
    encode = tokenizer.encode if request.add_special_tokens else tokenizer.encode_word
    return encode(request.prompt or "")
