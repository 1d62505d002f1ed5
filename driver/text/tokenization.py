"""Token ids of a text, or of a conversation as the model's template has it, and back."""

from collections.abc import Callable

from driver.errors import InvalidRequest
from driver.request import ActiveRequest, ReturnSample, TokenizerRequest, Usage
from driver.text.conversation import check_encodable, checked_chat
from driver.text.tokenizer import Tokenizer
from engine.config import ServingLimits


def answer_tokenizer(request: TokenizerRequest, tokenizer: Tokenizer, limits: ServingLimits) -> ReturnSample:
    """What is asked for; raises InvalidRequest."""
    given = [request.prompt, request.messages, request.token_ids]
    if sum(one is not None for one in given) != 1:
        raise InvalidRequest("a tokenizer is given a prompt, messages or token_ids: exactly one of them")
    text, token_ids = "", request.token_ids
    if token_ids is not None:
        check_fits("token_ids", len(token_ids), limits.max_model_len)
        check_in_vocabulary("token_ids", token_ids, limits.vocab_size)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    else:
        token_ids = _encoded(request, tokenizer, limits.max_model_len)
    return ReturnSample(
        request_id=request.request_id,
        text=text,
        token_ids=[] if text else token_ids,
        finish_reason="stop",
        usage=Usage(len(token_ids), 0),
    )


def text_token_ids(
    what: str, text: str, encode: Callable[[str], list[int]], tokenizer: Tokenizer, most: int
) -> list[int]:
    """Those of a text; raises InvalidRequest, before it is tokenised, where there are certainly more than ``most``."""
    check_encodable(what, text)
    check_fits(what, tokenizer.least_tokens(text), most, "at least ")
    return encode(text)


def chat_token_ids(request: ActiveRequest | TokenizerRequest, tokenizer: Tokenizer, most: int) -> list[int]:
    """Those of its conversation; raises InvalidRequest.

    It is the rendered text that has to fit: a template may leave a part of the messages out, such as former thoughts.
    """
    chat = checked_chat(request.messages, request.tools, request.chat_template_kwargs)
    return text_token_ids("the prompt", tokenizer.render(chat), tokenizer.encode_word, tokenizer, most)


def check_fits(what: str, num_tokens: int, most: int, about: str = "") -> None:
    """Raises InvalidRequest for more than ``most`` tokens."""
    if num_tokens > most:
        holds = f"a request may hold {most} tokens here, prompt and output together"
        raise InvalidRequest(f"{what} has {about}{num_tokens} tokens, but {holds}: shorten it")


def check_in_vocabulary(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first that is no token id."""
    if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}[{position}] must be a token id from 0 to {vocab_size - 1}, not {token_id!r}")


def _encoded(request: TokenizerRequest, tokenizer: Tokenizer, most: int) -> list[int]:
    if request.messages is not None:
        return chat_token_ids(request, tokenizer, most)
    if request.tools or request.chat_template_kwargs:
        raise InvalidRequest("tools and chat_template_kwargs are for the chat template: send messages")
    encode = tokenizer.encode if request.add_special_tokens else tokenizer.encode_word
    return text_token_ids("the prompt", request.prompt or "", encode, tokenizer, most)
