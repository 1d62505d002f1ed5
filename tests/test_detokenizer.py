"""Text in pieces is the text that decoding all at once gives."""

from collections.abc import Sequence as Tokens
from pathlib import Path

import pytest
from fakes import EOS, FakeTokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_files import BYTE_0, build_byte_fallback, build_byte_level, write_tokenizer
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from driver.text.detokenizer import MAX_HELD, MAX_WINDOW, PROMPT_TAIL, REPLACEMENT, Detokenizer
from driver.text.sample_text import SampleLogprobs
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import TokenLogprobs
from ipc.openai.logprob_bodies import TextPlace

DEMO = Path(__file__).parent.parent / "engine" / "models" / "demo"
KINDS = ["bytes", "byte_level", "byte_fallback"] + ["demo"] * (DEMO / "tokenizer.json").is_file()
ALPHABET = st.one_of(st.sampled_from("  aeinothT'.\n é今日😀🎉\u200d👩"), st.characters(exclude_categories=["Cs"]))
TEXTS = st.text(ALPHABET.filter(lambda character: character != REPLACEMENT), max_size=60)


class TableTokenizer(FakeTokenizer):
    """Each id stands for the bytes that a table gives; keeps count of the longest decoding asked for."""

    def __init__(self, table: list[bytes]) -> None:
        self.table = table
        self.longest = 0

    def decode(self, token_ids: Tokens[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self.table[token_id] for token_id in token_ids).decode(errors="replace")

    def is_visible(self, token_id: int) -> bool:
        return bool(self.table[token_id])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceTokenizer]:
    """A tokenizer of each kind."""
    directory = tmp_path_factory.mktemp("tokenizers")
    found: dict[str, HuggingFaceTokenizer] = {
        "bytes": FakeTokenizer(),
        "byte_level": HuggingFaceTokenizer(write_tokenizer(directory / "byte_level", build_byte_level())),
        "byte_fallback": HuggingFaceTokenizer(write_tokenizer(directory / "byte_fallback", build_byte_fallback())),
    }
    if "demo" in KINDS:
        found["demo"] = HuggingFaceTokenizer(DEMO)
    return found


def detokenize(tokenizer: HuggingFaceTokenizer, prompt: list[int], output: list[int]) -> list[str]:
    """The pieces, a token at a time, and what is flushed at the end."""
    detokenizer = Detokenizer(tokenizer, prompt[-PROMPT_TAIL:])
    return [detokenizer.add([token_id]) for token_id in output] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, data=st.data())
@example(text="the fox the fox", data=None)
def test_pieces_are_the_text_of_the_whole_without_that_of_the_prompt(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, text: str, data: st.DataObject | None
) -> None:
    """Concatenated, the pieces are decode(prompt + output) without decode(prompt), for every tokenizer and text."""
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    cuts = [n for n in range(len(token_ids) + 1) if not tokenizer.decode(token_ids[:n]).endswith(REPLACEMENT)]
    cut = data.draw(st.sampled_from(cuts)) if data is not None else cuts[len(cuts) // 2]
    prompt, output = token_ids[:cut], token_ids[cut:]

    pieces = detokenize(tokenizer, prompt, output)

    assert "".join(pieces) == tokenizer.decode(token_ids)[len(tokenizer.decode(prompt)) :]
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_several_tokens_at_once_give_the_same_text(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, text: str, sizes: list[int]
) -> None:
    """However many tokens come at once, the text is the same."""
    tokenizer = tokenizers[kind]
    prompt, output = tokenizer.encode("the fox"), tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, prompt)

    pieces: list[str] = []
    start = 0
    while start < len(output):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(detokenizer.add(output[start : start + size]))
        start += size

    assert "".join([*pieces, detokenizer.flush()]) == "".join(detokenize(tokenizer, prompt, output))


@pytest.mark.parametrize("kind", ["bytes", "byte_level"])
@given(token_ids=st.lists(st.integers(3, 255), max_size=80), cut=st.integers(0, 10))
def test_tokens_that_are_no_text_lose_nothing_of_what_is(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, token_ids: list[int], cut: int
) -> None:
    """Random bytes come out as U+FFFD here and there, and every character that decoding all at once finds."""
    tokenizer = tokenizers[kind]
    whole, prompt = tokenizer.decode(token_ids), tokenizer.decode(token_ids[:cut]).rstrip(REPLACEMENT)

    pieces = detokenize(tokenizer, token_ids[:cut], token_ids[cut:])

    assert "".join(pieces).replace(REPLACEMENT, "") == whole[len(prompt) :].replace(REPLACEMENT, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_leading_space_is_kept(tokenizers: dict[str, HuggingFaceTokenizer], kind: str) -> None:
    """The first word of the output keeps the space between it and the prompt, special tokens between them or not."""
    tokenizer = tokenizers[kind]
    whole = tokenizer.encode("the fox the fox")
    prompt = next(whole[:n] for n in range(len(whole)) if tokenizer.decode(whole[:n]) == "the fox")
    special = [n for n in range(EOS + 3) if not tokenizer.is_visible(n)][:1] * 20

    pieces = detokenize(tokenizer, prompt + special, special + whole[len(prompt) :])

    assert "".join(pieces) == " the fox"


def test_half_a_character_is_held_until_its_other_half() -> None:
    """Of a character in four tokens the first three give no text and the fourth gives it whole."""
    pieces = detokenize(FakeTokenizer(), list(b"a"), list("😀b".encode()))

    assert pieces == ["", "", "", "😀", "b", ""]


def test_an_invalid_byte_is_shown_once_the_text_goes_on(tokenizers: dict[str, HuggingFaceTokenizer]) -> None:
    """A byte that no character starts with comes out as U+FFFD together with the text that follows it."""
    fallback = tokenizers["byte_fallback"]
    invalid, word = BYTE_0 + 0xFF, fallback.encode("a")

    assert detokenize(FakeTokenizer(), [], [0xFF, ord("a")]) == ["", "\ufffda", ""]
    assert detokenize(fallback, fallback.encode("€"), [invalid, *word]) == ["", "\ufffd a", ""]


def test_an_endless_run_of_invalid_bytes_is_not_held() -> None:
    """At most three tokens are held: what is older can't be finished any more, but a character after it can."""
    pieces = detokenize(FakeTokenizer(), list(b"a"), [0xFF] * 50 + list("😀".encode()))

    assert pieces[MAX_HELD:50] == [REPLACEMENT] * (50 - MAX_HELD)
    assert "".join(pieces) == REPLACEMENT * 50 + "😀"


def test_characters_between_invalid_byte_tokens_survive(tokenizers: dict[str, HuggingFaceTokenizer]) -> None:
    """A decoder that shows a run of byte tokens as invalid throughout costs no valid character around the bad byte."""
    fallback = tokenizers["byte_fallback"]
    euro = [BYTE_0 + byte for byte in "€".encode()]

    pieces = detokenize(fallback, fallback.encode("a"), [*euro, BYTE_0 + 0xFF, *euro])

    assert "".join(pieces) == "€\ufffd€"


def test_what_never_completes_is_shown_at_the_end() -> None:
    """The end of the output shows half a character as decoding all at once does."""
    assert detokenize(FakeTokenizer(), list(b"a"), list("b😀".encode())[:-1]) == ["b", "", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ("a\ufffd".encode(), b"b", "b"),
        ("a\ufffd".encode(), b"", ""),
        ("a😀".encode()[:-2], "😀b".encode()[2:], "😀b"),
    ],
)
def test_a_prompt_that_ends_in_a_replacement_character(prompt: bytes, output: bytes, text: str) -> None:
    """A U+FFFD of the prompt is not repeated; half a character that the output finishes is shown whole."""
    assert "".join(detokenize(FakeTokenizer(), list(prompt), list(output))) == text


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([0] + [1] * 500, "😀" * 500),
        ([2] * 500, "ab" * 500),
        ([3] * 500 + [2], "ab"),
        ([4] * 500, REPLACEMENT * 500),
    ],
    ids=["no token ends a character", "words", "special tokens", "invalid bytes"],
)
def test_a_token_costs_a_window_however_long_the_text(output: list[int], text: str) -> None:
    """No more than a window of tokens is decoded at a time, and the text is still exact."""
    face = "😀".encode()
    tokenizer = TableTokenizer([face[:1], face[1:] + face[:1], b"ab", b"", b"\xff"])

    pieces = detokenize(tokenizer, [2], output)

    assert "".join(pieces).rstrip(REPLACEMENT) == text.rstrip(REPLACEMENT)
    assert tokenizer.longest <= MAX_WINDOW + 1


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_special_tokens_are_shown_where_they_are_if_asked_for(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str
) -> None:
    """As decoding all at once shows them, in the midst of text, at its start and next to each other."""
    tokenizer = tokenizers[kind]
    end, user = (tokenizer.encode_word(special)[0] for special in ("<|end|>", "<|user|>"))
    words = tokenizer.encode_word("the fox")
    output = [end, *words, end, user, *words, user]

    detokenizer = Detokenizer(tokenizer, [], special=True)
    text = "".join([detokenizer.add([token_id]) for token_id in output]) + detokenizer.flush()

    assert tokenizer.is_special(end) and not tokenizer.is_special(words[0])
    assert text == tokenizer.decode(output, skip_special_tokens=False)


@pytest.mark.parametrize(("spaces", "text"), [(True, "a <x> <y> b <x>"), (False, "a <x><y> b <x>")])
def test_special_tokens_next_to_each_other_are_spaced_if_asked_for(tmp_path: Path, spaces: bool, text: str) -> None:
    """A tokenizer that puts spaces between all tokens puts none between special ones without spaces_between_special_tokens."""
    words = Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(token, special=True) for token in ("<x>", "<y>")])
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "words", words))

    detokenizer = Detokenizer(tokenizer, [], special=True, spaces=spaces)

    assert detokenizer.add(tokenizer.encode("a <x> <y> b <x>")) + detokenizer.flush() == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the fox on the fox", "a  b\n 😀 é今日"])
def test_tokens_with_log_probabilities_add_up_to_the_text(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, text: str
) -> None:
    """With the spaces before words, which a tokenizer drops in front of the first; also in bytes, and in characters."""
    token_ids = tokenizers[kind].encode_word(text)

    named = SampleLogprobs(0, SamplingParams(logprobs=0), tokenizers[kind]).of_output(
        [TokenLogprobs([token_id], [-1.0], [1]) for token_id in token_ids]
    )

    own = [next(iter(token.values())) for token in named]
    spelt = b"".join(one.token_bytes or (one.decoded_token or "").encode() for one in own).decode()
    assert spelt.removeprefix(" ") == text  # one kind's normaliser puts a space before it
    assert [0, *TextPlace().pass_tokens(named)][-1] == len(spelt)
    assert all(REPLACEMENT in (one.decoded_token or "") or one.token_bytes is None for one in own)
