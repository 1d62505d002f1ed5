"""The flags of ``odriver complete`` and ``odriver chat``: one for each parameter of SamplingParams, with its range."""

import argparse
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine.request_limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TIMEOUT,
)
from engine.sampling_params import RepetitionDetection, SamplingParams

_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "length": {
        "max_tokens": ("N", "most tokens to generate, 1 or more (default: as the model and the context allow)"),
        "min_tokens": ("N", "fewest tokens to generate: nothing ends the output before, 0 to max-tokens (default: 0)"),
        "truncate_prompt_tokens": (
            "N",
            "use the last N tokens of the prompt alone, 1 or more; -1 is as many as leave room for max-tokens (default: all)",
        ),
    },
    "scheduling": {
        "priority": ("N", "priority; lower is served first (default: 0)"),
        "timeout_s": ("F", f"seconds after which the request ends, above 0 to {MAX_TIMEOUT:g}"),
        "queue_timeout_s": (
            "F",
            f"seconds after which the request ends if it has not begun, above 0 to {MAX_TIMEOUT:g}",
        ),
        "num_speculative_tokens": (
            "N",
            f"most drafted tokens that a step verifies, 0 to {MAX_SPECULATIVE_TOKENS}; 0 is none (default: the daemon's)",
        ),
        "cache_salt": ("TEXT", "share computed pages only with requests of the same salt"),
        "enable_prefix_caching": ("", "share computed pages with prompts that begin alike (default: yes)"),
    },
    "choice of tokens": {
        "temperature": (
            "F",
            "randomness, 0 to 100; 0 takes the likeliest token each time (default: the model's, or 1)",
        ),
        "top_p": (
            "F",
            "keep the likeliest tokens that are this probable together, above 0 to 1 (default: the model's, or 1)",
        ),
        "top_k": (
            "N",
            "keep so many of the likeliest tokens, 1 or more; 0 or -1 keeps all (default: the model's, or 0)",
        ),
        "min_p": (
            "F",
            "keep tokens at least this share as probable as the likeliest, 0 to 1 (default: the model's, or 0)",
        ),
        "seed": ("N", f"seed of the draws, the same for the same draws, 0 to {MAX_SEED} (default: drawn anew)"),
        "presence_penalty": ("F", "subtract this from the logits of tokens in the output, -2 to 2 (default: 0)"),
        "frequency_penalty": ("F", "the same for each time that the token is in the output, -2 to 2 (default: 0)"),
        "repetition_penalty": (
            "F",
            "make tokens of prompt and output less likely by this factor, 0.01 to 10; 1 changes nothing (default: the model's, or 1)",
        ),
    },
    "which tokens": {
        "logit_bias": ("ID=F", "add F to the logit of token ID, -100 to 100; may be given several times"),
        "allowed_token_ids": ("ID,ID", "generate these tokens and no others, at least one"),
        "bad_words": (
            "S",
            f"a text never to generate, of at most {MAX_BAD_WORD_TOKENS} tokens; up to {MAX_BAD_WORDS} times",
        ),
    },
    "where it ends": {
        "stop": ("S", f"end before this text, 1 to {MAX_STOP_LENGTH} characters; up to {MAX_STOPS} times"),
        "stop_token_ids": ("ID,ID", f"end at one of these tokens, at most {MAX_STOP_TOKEN_IDS}"),
        "include_stop_str_in_output": ("", "keep the stop string or token in the output"),
        "ignore_eos": ("", "go on past the model's end token"),
        "repetition_detection": (
            "MAX[,MIN[,COUNT]]",
            f"end when MIN to MAX tokens (1 to {MAX_PATTERN_SIZE}) come COUNT times in a row (2 to {MAX_PATTERN_COUNT}; "
            "default: 1 and 2)",
        ),
    },
    "output": {
        "n": ("N", f"completions of the prompt, 1 to {MAX_N} (default: 1)"),
        "logprobs": ("N", f"log-probabilities of each token and the N likeliest, 0 to {MAX_LOGPROBS}; as JSON"),
        "prompt_logprobs": ("N", f"the same of the prompt's tokens, 0 to {MAX_LOGPROBS}; as JSON"),
        "detokenize": ("", "turn tokens into text (default: yes)"),
        "skip_special_tokens": ("", "leave special tokens out of texts (default: yes)"),
        "spaces_between_special_tokens": (
            "",
            "put spaces between special tokens, as the tokenizer does (default: yes)",
        ),
    },
}
"""By group and parameter: what stands for the value in a usage line, and what the flag is for."""

FORMS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "disable_any_whitespace": "disable_any_whitespace",
    "whitespace_pattern": "whitespace_pattern",
    "disable_additional_properties": "disable_additional_properties",
}
"""Flags of the text's form, and the fields of StructuredOutputsParams that they fill."""


def add_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add all flags but those. The daemon's defaults hold for flags that are not given."""
    hints = typing.get_type_hints(SamplingParams)
    for title, parameters in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, (metavar, what) in parameters.items():
            if name in without:
                continue
            flag = f"--{name.replace('_', '-')}"
            if hints[name] is not bool:
                group.add_argument(flag, metavar=metavar, help=what, **_reading(hints[name]))
            elif getattr(SamplingParams(), name):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, help=what)
            else:
                group.add_argument(flag, action="store_true", help=what)
    _add_forms(parser.add_argument_group("structured outputs", "at most one of the first five"))


def take_params(options: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams by name, out of the options of ``add_arguments``."""
    forms = {field: options.pop(flag) for flag, field in FORMS.items() if flag in options}
    return options | ({"structured_outputs": forms} if forms else {})


def _add_forms(group: Any) -> None:
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", type=_text, metavar="FILE", help="the text is JSON that this schema allows")
    add("--json-object", action="store_true", help="the text is a JSON object")
    add("--regex", metavar="R", help="the text matches all of this pattern")
    add("--choice", action="append", metavar="S", help="the text is this one; given several times, one of them")
    add("--grammar", type=_text, metavar="FILE", help="the text is what this grammar allows, in Lark's notation")
    add = group.add_argument
    add("--disable-any-whitespace", action="store_true", help="JSON has no whitespace around its punctuation")
    add("--whitespace-pattern", metavar="R", help="JSON has whitespace there that matches this pattern")
    add("--disable-additional-properties", action="store_true", help="JSON has only properties that its schema names")


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if isinstance(hint, types.UnionType):  # of ``str | list[str]`` the latter
        hint = [kind for kind in typing.get_args(hint) if kind is not types.NoneType][-1]
    if hint == list[str]:
        return {"action": "append"}
    if hint == dict[int, float]:
        return {"action": _Update, "type": _biased}
    return {"type": {list[int]: _token_ids, RepetitionDetection: _repetition}.get(hint, hint)}


class _Update(argparse.Action):
    """Gathers the dictionaries of a flag that is given several times."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        del parser, option
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


def _biased(text: str) -> dict[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return {int(token_id): float(bias)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a token id and a number, as in 5=-2.5, not {text!r}") from None


def _token_ids(text: str) -> list[int]:
    return _integers(text, "must be token ids, as in 5,7")


def _repetition(text: str) -> dict[str, int]:
    names, must = RepetitionDetection.__struct_fields__, "must be one to three whole numbers, as in 8,2,3"
    numbers = _integers(text, must)
    if len(numbers) > len(names):
        raise argparse.ArgumentTypeError(f"{must}, not {text!r}")
    return dict(zip(names, numbers, strict=False))


def _integers(text: str, must: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{must}, not {text!r}") from None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from error
