"""Tokenizers of model directories that have no tokenizer.json, each by its own file."""

import base64
import json
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizer_files import CORPUS, SPECIAL, build_byte_level, write_tokenizer
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors

from driver.text.byte_pairs import LLAMA_PATTERN, PATTERNS
from driver.text.detokenizer import Detokenizer
from driver.text.token_bytes import token_bytes
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.errors import ConfigurationError

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "sentencepiece.json").read_text())
LETTERS = [
    token_bytes(token) or b"" for token, _ in sorted(build_byte_level().get_vocab().items(), key=lambda row: row[1])
]
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(token for token in LETTERS if len(token) > 1 and b"|" not in token),
]
RANKS = {token: rank for rank, token in enumerate(TOKENS)}
TEXTS = [*CORPUS, "", " ", "aaaaaaa", "😀👩‍👩‍👧", "the fox the fox's 12345\r\n\n\t x"]


def merged(text: str, pattern: str) -> list[int]:
    """Tiktoken's algorithm, the slow way: the pair of the lowest rank first, and of two the left one."""
    token_ids = []
    for word in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while word.encode() not in RANKS or len(parts) > 1:
            pairs = [RANKS.get(left + right, len(RANKS)) for left, right in pairwise(parts)]
            if word.encode() in RANKS:
                parts = [word.encode()]
            elif not pairs or min(pairs) == len(RANKS):
                break
            else:
                place = pairs.index(min(pairs))
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
        token_ids += [RANKS[part] for part in parts]
    return token_ids


def write_tiktoken(directory: Path, name: str, model_type: str, config: dict[str, Any] | None = None) -> Path:
    """A directory with a file of tiktoken."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()]
    (directory / name).write_bytes(b"".join(lines))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_tekken(directory: Path, **fields: Any) -> Path:
    """A directory with a tekken.json of 20 special tokens, and fields that replace its own."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    padding = [{"rank": len(RANKS), "token_bytes": "AAAA", "token_str": None}]
    sizes = {"default_vocab_size": len(RANKS) + 20, "default_num_special_tokens": 20}
    given = {"config": {"pattern": LLAMA_PATTERN, **sizes}, "vocab": vocabulary + padding, **fields}
    (directory / "tekken.json").write_text(json.dumps(given))
    return directory


def test_a_tekken_file_is_a_tokenizer(tmp_path: Path) -> None:
    """Its special tokens come first, then its tokens by rank; a prompt begins with <s>."""
    tokenizer = HuggingFaceTokenizer(write_tekken(tmp_path))

    for text in TEXTS:
        assert tokenizer.encode_word(text) == [20 + rank for rank in merged(text, LLAMA_PATTERN)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a[INST]")[0] == 1 and tokenizer.encode("a[INST]")[-1] == 3
    assert tokenizer.eos_token_ids == (2,) and tokenizer.is_special(9) and not tokenizer.is_visible(9)


def test_a_tekken_file_names_its_special_tokens(tmp_path: Path) -> None:
    """In the newer files, with places between them that have no name."""
    named = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])]
    tokenizer = HuggingFaceTokenizer(write_tekken(tmp_path, special_tokens=named))

    assert tokenizer.encode_word("[THINK]<SPECIAL_19>") == [3, 19]


@pytest.mark.parametrize(
    ("name", "model_type", "family"), [("tokenizer.model", "llama", "llama"), ("qwen.tiktoken", "qwen2", "qwen")]
)
def test_a_tiktoken_file_is_a_tokenizer(tmp_path: Path, name: str, model_type: str, family: str) -> None:
    """Words are cut, and special tokens named, as the family does."""
    tokenizer = HuggingFaceTokenizer(write_tiktoken(tmp_path, name, model_type))
    start = "<|begin_of_text|>" if family == "llama" else "<|endoftext|>"

    for text in TEXTS:
        assert tokenizer.encode_word(text) == merged(text, PATTERNS[family])
    assert tokenizer.encode_word(start) == [len(RANKS)]
    assert tokenizer.encode("") == ([len(RANKS)] if family == "llama" else [])
    assert len(PATTERNS["qwen"]) < len(PATTERNS["llama"])


def test_tokens_are_added_where_the_files_say(tmp_path: Path) -> None:
    """By tokenizer_config.json, wherever the ids are; the end token is its own."""
    added = {str(len(RANKS) + 7): {"content": "<|im_end|>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    tokenizer = HuggingFaceTokenizer(write_tiktoken(tmp_path, "qwen.tiktoken", "qwen2", config))

    assert tokenizer.encode("a<|im_end|>") == [RANKS[b"a"], len(RANKS) + 7]
    assert tokenizer.eos_token_ids == (len(RANKS) + 7,)


@pytest.fixture(scope="module", params=GOLDENS["models"])
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of a SentencePiece model, and what the library makes of the texts."""
    case = GOLDENS["models"][request.param]
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "tokenizer.model").write_bytes(base64.b64decode(case["model"]))
    return HuggingFaceTokenizer(directory), case


def test_a_sentencepiece_model_is_a_tokenizer(golden: Any) -> None:
    """It encodes and decodes as the library does: BPE and Unigram, with bytes for unknown characters."""
    tokenizer, case = golden

    for text, token_ids, decoded in zip(GOLDENS["texts"], case["token_ids"], case["decoded"], strict=True):
        assert tokenizer.encode_word(text) == token_ids
        assert tokenizer.decode(token_ids) == decoded
    assert tokenizer.encode("fox")[0] == tokenizer.encode_word("<s>")[-1]
    assert tokenizer.decode(list(tokenizer.eos_token_ids), skip_special_tokens=False) == "</s>"


def test_pieces_of_a_sentencepiece_model_stream(golden: Any) -> None:
    """Half a character waits for its other half, and its bytes are known."""
    tokenizer, _ = golden
    token_ids = tokenizer.encode_word("the 😀 한!")
    pieces = Detokenizer(tokenizer, [])

    text = "".join(pieces.add([token_id]) for token_id in token_ids) + pieces.flush()

    assert text.strip() == "the 😀 한!"
    assert "😀".encode() in b"".join(tokenizer.bytes_of(token_id) or b"?" for token_id in token_ids)


def test_placeholders_of_a_sentencepiece_model_are_renamed(tmp_path: Path) -> None:
    """By tokenizer_config.json, which also adds tokens behind the model's."""
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(GOLDENS["models"]["llama"]["model"]))
    added = {"3": {"content": "<|user|>", "special": True}, "402": {"content": "<tool_call>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))

    assert HuggingFaceTokenizer(tmp_path).encode("<|user|><tool_call>") == [1, 3, 402]


def test_older_files_add_tokens_too(tmp_path: Path) -> None:
    """added_tokens.json, as checkpoints have it whose tokenizer_config.json lists none."""
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(GOLDENS["models"]["llama"]["model"]))
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<|im_end|>": 402, "<tool>": 401, "<|im_start|>": 400, "</s>": 2})
    )
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "additional_special_tokens": ["<|im_start|>"]}
    names |= {"pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = HuggingFaceTokenizer(tmp_path)

    token_ids = tokenizer.encode_word("<|im_start|>a<tool><|im_end|>")

    assert (token_ids[0], *token_ids[-2:]) == (400, 401, 402)
    assert tokenizer.decode(token_ids).strip() == "a<tool>"
    assert tokenizer.eos_token_ids == (402,)
    assert tokenizer.is_special(2)


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken"])
def test_an_added_token_may_be_text(tmp_path: Path, name: str) -> None:
    """Such as what encloses a call or a thought: it is in the text that a client gets, unlike a special token."""
    added = {
        "402": {"content": "<think>", "special": False, "normalized": False},
        "403": {"content": "<|user|>", "special": True, "lstrip": True},
    }
    write_tiktoken(tmp_path, name, "qwen2", {"added_tokens_decoder": added})
    if name == "tokenizer.model":
        (tmp_path / name).write_bytes(base64.b64decode(GOLDENS["models"]["llama"]["model"]))
    tokenizer = HuggingFaceTokenizer(tmp_path)

    token_ids = tokenizer.encode_word("a<think>  <|user|>")

    assert token_ids[-2:] == [402, 403]
    assert tokenizer.decode(token_ids) == "a<think>"
    assert (tokenizer.is_special(402), tokenizer.is_special(403)) == (False, True)


@pytest.mark.parametrize("kind", ["tekken", "tiktoken", "llama", "t5"])
def test_grammars_know_the_tokens_of_each_kind(tmp_path: Path, kind: str) -> None:
    """The definition that the grammars' processes get is read, and each token has its bytes."""
    if kind in GOLDENS["models"]:
        (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(GOLDENS["models"][kind]["model"]))
    else:
        write_tekken(tmp_path) if kind == "tekken" else write_tiktoken(tmp_path, "tokenizer.model", "llama")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    theirs = LLTokenizer(tokenizer.definition(), eos_token=list(tokenizer.eos_token_ids))

    token_ids = tokenizer.encode_word("the fox 😀")
    assert theirs.decode_bytes(token_ids).decode().strip() == "the fox 😀"


def build_unusual() -> Tokenizer:
    """One that normalises, cuts, decodes and ends a text as no class of transformers would."""
    tokenizer = build_byte_level()
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("!", 0, 1)])
    token_id = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", token_id)]
    )
    return tokenizer


CLASSES = ["GPT2Tokenizer", "LlamaTokenizerFast", "GemmaTokenizerFast", "CohereTokenizerFast", "Qwen2Tokenizer"]


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "qwen3_5", "gemma3_text", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast", *CLASSES])
def test_a_tokenizer_json_is_taken_as_it_is(
    tmp_path: Path, model_type: str | None, tokenizer_class: str | None
) -> None:
    """Whatever class its config names, or transformers has for the family: all but the tokens that
    tokenizer_config.json adds, and names.
    """
    unusual = build_unusual()
    unusual.save(str(tmp_path / "tokenizer.json"))
    added = {str(unusual.get_vocab_size()): {"content": "<think>", "special": False}}
    config = {"eos_token": "<|end|>", "added_tokens_decoder": added, "auto_map": {"AutoTokenizer": [None, "x.Y"]}}
    config |= {"add_bos_token": True} | ({"tokenizer_class": tokenizer_class} if tokenizer_class else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    tokenizer = HuggingFaceTokenizer(tmp_path)

    ours, theirs = json.loads(tokenizer.definition()), json.loads(unusual.to_str())
    assert [token["content"] for token in ours.pop("added_tokens")] == [*SPECIAL, "<think>"]
    del theirs["added_tokens"]
    assert ours == theirs
    assert tokenizer.encode("The FOX 12") == unusual.encode("The FOX 12").ids
    assert tokenizer.eos_token_ids == (unusual.token_to_id("<|end|>"),)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    """Where a directory has both."""
    write_tekken(write_tokenizer(tmp_path, build_byte_level()))

    assert HuggingFaceTokenizer(tmp_path).definition() == HuggingFaceTokenizer(tmp_path).definition()
    assert HuggingFaceTokenizer(tmp_path).encode_word("[INST]") == build_byte_level().encode("[INST]").ids


def test_files_of_an_unknown_family_are_refused(tmp_path: Path) -> None:
    """Tiktoken's files do not say how words are cut, so a guess would be wrong in silence."""
    write_tiktoken(tmp_path, "x.tiktoken", "foo")

    with pytest.raises(ConfigurationError, match=r"known for llama, glm, qwen.* not for foo.*--tokenizer"):
        HuggingFaceTokenizer(tmp_path)


def test_the_code_of_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked on standard input whether it may be, as transformers does."""
    (tmp_path / "vocab.json").write_text(json.dumps(build_byte_level().get_vocab()))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own:\n    pass\n")
    monkeypatch.setattr("sys.stdin", StringIO("y\ny\n"))

    with pytest.raises(ConfigurationError, match="contains custom code"):
        HuggingFaceTokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


WRONG = [b"", b"{", b"{}", b"[1]", b"\xff\xfe", b"YQ== 0\nYg==", b"YQ== 0\n", b"\x0a\xff\xff\xff\xff\x0f"]


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "x.tiktoken"])
@pytest.mark.parametrize("content", WRONG)
def test_a_wrong_file_is_a_configuration_error(tmp_path: Path, name: str, content: bytes) -> None:
    """That names it."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigurationError, match="cannot be read"):
        HuggingFaceTokenizer(tmp_path)


@given(cut=st.integers(0, 6000), byte=st.integers(0, 255))
def test_a_damaged_sentencepiece_model_is_no_crash(
    tmp_path_factory: pytest.TempPathFactory, cut: int, byte: int
) -> None:
    """Wherever it is cut off or changed, it is read or refused."""
    directory = tmp_path_factory.mktemp("damaged")
    model = base64.b64decode(GOLDENS["models"]["llama"]["model"])
    place = cut % len(model)
    for damaged in (model[:place], model[:place] + bytes([byte]) + model[place + 1 :]):
        (directory / "tokenizer.model").write_bytes(damaged)
        try:
            HuggingFaceTokenizer(directory).encode("the fox")
        except ConfigurationError as error:
            assert str(directory) in str(error) or "cannot be read" in str(error)
