"""``--timings``: how long a reply took, on stderr."""

import argparse
import sys

from driver.request import Usage


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The flag."""
    parser.add_argument("--timings", action="store_true", default=False, help="say on stderr how long the reply took")


def show(usage: Usage) -> None:
    """Print what a reply cost, in one line."""
    facts = [
        f"{usage.prompt_tokens} tokens of prompt ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} of reply",
    ]
    took = usage.timings
    if took is not None:
        facts += [
            f"queued {1000 * took.queue_time_s:.1f} ms",
            f"prefill {1000 * took.prefill_time_s:.1f} ms",
            f"first token after {1000 * took.time_to_first_token_s:.1f} ms",
            f"{took.tokens_per_second:.1f} tokens/s",
        ]
    print(f"[{', '.join(facts)}]", file=sys.stderr)
