"""``odriver complete``: its flags, which are SamplingParams, and how a completion is shown."""

import argparse
from typing import Any

import msgspec

from engine.request_limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TIMEOUT,
)
from ipc.client import Client
from ipc.wire import escaping


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each parameter, with its range; what is not given is left to the daemon."""
    _add_lengths(parser)
    _add_scheduling(parser)
    _add_distribution(parser)
    _add_tokens(parser)
    _add_stops(parser)
    _add_output(parser)


def show(client: Client, prompt: str, params: dict[str, Any], *, json: bool) -> None:
    """Print a completion: as it comes, or, where it is more than one text, when it is whole."""
    if json or "logprobs" in params or "prompt_logprobs" in params:
        whole = client.complete(prompt, **params)
        escaping.write(escaping.visible_json(msgspec.json.format(msgspec.json.encode(whole)).decode()))
    elif params.get("n", 1) > 1:
        for choice in client.complete(prompt, **params).choices:
            escaping.write(f"[{choice.index}] {choice.text}")
    else:
        with client.generate(prompt, **params) as pieces:
            for piece in pieces:
                escaping.write(piece.text, end="")
        print()


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("length").add_argument
    add("--max-tokens", type=int, metavar="N", help="at most so many, 1 or more (default: as the context allows)")
    add(
        "--min-tokens",
        type=int,
        metavar="N",
        help="end by no token or text before so many, 0 to max-tokens (default: 0)",
    )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scheduling").add_argument
    add("--priority", type=int, metavar="N", help="lower is served first (default: 0)")
    add("--timeout-s", type=float, metavar="F", help=f"end after so many seconds, above 0 to {MAX_TIMEOUT:g}")
    add(
        "--queue-timeout-s", type=float, metavar="F", help=f"end if not begun after so many, above 0 to {MAX_TIMEOUT:g}"
    )
    add("--cache-salt", metavar="TEXT", help="share computed pages with requests of the same salt only")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share computed pages of prompts that begin alike (default: yes)",
    )


def _add_distribution(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("choice of tokens").add_argument
    add("--temperature", type=float, metavar="F", help="0 to 100; 0 takes the likeliest token each time (default: 1)")
    add(
        "--top-p",
        type=float,
        metavar="F",
        help="the likeliest that are this probable together, above 0 to 1 (default: 1)",
    )
    add("--top-k", type=int, metavar="N", help="so many of the likeliest, 1 or more; 0 or -1 is all (default: 0)")
    add(
        "--min-p",
        type=float,
        metavar="F",
        help="those at least this share as probable as the likeliest, 0 to 1 (default: 0)",
    )
    add("--seed", type=int, metavar="N", help=f"the same draws the same tokens, 0 to {MAX_SEED} (default: drawn anew)")
    add("--presence-penalty", type=float, metavar="F", help="off what the output has already, -2 to 2 (default: 0)")
    add("--frequency-penalty", type=float, metavar="F", help="off for each time that it has it, -2 to 2 (default: 0)")
    add(
        "--repetition-penalty",
        type=float,
        metavar="F",
        help="makes less likely what prompt or output have, 0.01 to 10; 1 is none (default: 1)",
    )


def _add_tokens(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which tokens").add_argument
    add(
        "--logit-bias",
        type=_biased,
        action=_Update,
        metavar="ID=F",
        help="add to this token's logit, -100 to 100; may be given several times",
    )
    add("--allowed-token-ids", type=_token_ids, metavar="ID,ID", help="these and no others, at least one")
    add(
        "--bad-words",
        action="append",
        metavar="S",
        help=f"never say this, of at most {MAX_BAD_WORD_TOKENS} tokens; up to {MAX_BAD_WORDS} times",
    )


def _add_stops(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where it ends").add_argument
    add(
        "--stop",
        action="append",
        metavar="S",
        help=f"before this text, 1 to {MAX_STOP_LENGTH} characters; up to {MAX_STOPS} times",
    )
    add(
        "--stop-token-ids",
        type=_token_ids,
        metavar="ID,ID",
        help=f"at one of these tokens, at most {MAX_STOP_TOKEN_IDS}",
    )
    add("--include-stop-str-in-output", action="store_true", help="behind what ends it instead of before")
    add("--ignore-eos", action="store_true", help="not at the model's own end token")
    add(
        "--repetition-detection",
        type=_repetition,
        metavar="MAX[,MIN[,COUNT]]",
        help=f"when MIN to MAX tokens (1 to {MAX_PATTERN_SIZE}) come COUNT times in a row (2 to {MAX_PATTERN_COUNT}; "
        "default: 1 and 2)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add, either = parser.add_argument_group("output").add_argument, argparse.BooleanOptionalAction
    add("--n", type=int, metavar="N", help=f"so many completions, 1 to {MAX_N} (default: 1)")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help=f"log-probabilities of each token and the N likeliest, 0 to {MAX_LOGPROBS}; as JSON",
    )
    add(
        "--prompt-logprobs",
        type=int,
        metavar="N",
        help=f"the same of the prompt's tokens, 0 to {MAX_LOGPROBS}; as JSON",
    )
    add("--detokenize", action=either, help="make texts of tokens (default: yes)")
    add("--skip-special-tokens", action=either, help="leave special tokens out of texts (default: yes)")
    add("--spaces-between-special-tokens", action=either, help="as the tokenizer spaces them (default: yes)")
    add("--json", action="store_true", default=False, help="everything there is, as JSON")


class _Update(argparse.Action):
    """Gathers the dictionaries of a flag that is given several times."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        del parser, option
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


def _biased(text: str) -> dict[int, float]:
    token_id, _, bias = text.partition("=")
    return {int(token_id): float(bias)}


def _token_ids(text: str) -> list[int]:
    return [int(token_id) for token_id in text.split(",")]


def _repetition(text: str) -> dict[str, int]:
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    numbers = [int(number) for number in text.split(",")]
    return dict(zip(names[: len(numbers)], numbers, strict=True))
