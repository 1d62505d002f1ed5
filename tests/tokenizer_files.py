"""Small tokenizers of the two kinds that models come with, as the files of a model directory."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Once upon a time there was a fox, and the fox said: 'I don't know!' Then it went to the river. ",
    "Zoë drank 3 cups of café au lait — naïve façade, 25 °C. 今日は良い天気ですね。 Привет, мир! 😀😀🎉 👩‍👩‍👧",
    "def f(x):\n    return x  +  1\n\n\tprint(f(41))\n",
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
BYTE_0 = 2 + len(SPECIAL)
"""The id of the first byte token of the byte-fallback tokenizer."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(' ') }}{% endif %}"
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined %}<think>\n{{ '' if enable_thinking else '\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""One that knows tools and thinking, in the manner of Qwen3's."""


def build_byte_level() -> Tokenizer:
    """GPT-2's kind: every byte is a letter. Its tokens may end in the middle of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s?\S+|\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def build_byte_fallback() -> Tokenizer:
    """Llama 2's kind: words start with U+2581, unknown characters fall back to bytes, a leading space is dropped."""
    pieces = ["<unk>", "<s>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyzTIO.,!'é今日")
    merges = [
        ("▁", "▁"),
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("▁", "a"),
        ("▁", "f"),
        ("o", "x"),
        ("▁f", "ox"),
        ("o", "n"),
    ]
    pieces += [left + right for left, right in merges]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", *SPECIAL)])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes the files that a model directory holds beside its weights; returns the directory."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory
