"""How many tokens a text has at the least."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import CORPUS, SPECIAL, build_byte_fallback, build_byte_level
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from driver.text.least_tokens import LeastTokens

DEMO = Path(__file__).parent.parent / "engine" / "models" / "demo" / "tokenizer.json"
TOKENIZERS = {
    "byte level": build_byte_level(),
    "byte fallback": build_byte_fallback(),
    "demo": Tokenizer.from_file(str(DEMO)),
}
TOKENIZERS["composing"] = build_byte_level()
TOKENIZERS["composing"].normalizer = normalizers.NFC()
BOUNDS = {name: LeastTokens(tokenizer.to_str()) for name, tokenizer in TOKENIZERS.items()}

WORDS = [*CORPUS, *SPECIAL, " ", "  ", "\n\n", "e\u0301", "가", "a" * 20, "1234567890", "\u2581"]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=20), max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    """Whatever it is made of."""
    assert BOUNDS[name].at_least(text) <= len(TOKENIZERS[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bound_is_worth_having(name: str) -> None:
    """It grows with the text, by a good part of what there is: a text of megabytes cannot fit a thousand tokens."""
    for text in ("a", " ", "1", "\u4eca", "fox "):
        assert BOUNDS[name].at_least(text * 2**20) > 2**20 / 20


def test_whitespace_that_added_tokens_strip_does_not_count() -> None:
    """One token and any number of spaces are one token."""
    definition = json.loads(build_byte_level().to_str())
    definition["added_tokens"][0]["rstrip"] = True
    text = SPECIAL[0] + " " * 1000
    tokenizer = Tokenizer.from_str(json.dumps(definition))

    assert len(tokenizer.encode(text).ids) == 1
    assert LeastTokens(json.dumps(definition)).at_least(text) == 1


def lossy() -> dict[str, Tokenizer]:
    """Tokenizers of which a long text may have few tokens, or none."""
    collapsing, removing, unknown = build_byte_level(), build_byte_level(), build_byte_fallback()
    collapsing.normalizer = normalizers.Replace("  ", "")
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)]
    )
    unknown = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    return {"collapses": collapsing, "removes": removing, "has one token for all it does not know": unknown}


@pytest.mark.parametrize(("name", "tokenizer"), lossy().items())
def test_where_text_may_vanish_nothing_is_said(name: str, tokenizer: Tokenizer) -> None:
    """The bound is 0, whatever the text."""
    del name
    bound = LeastTokens(tokenizer.to_str())

    assert bound.at_least(" " * 1000) == bound.at_least("今日" * 1000) == 0
