"""The command line of `scripts/check_gateway`."""

import argparse
import sys
import tempfile
from collections.abc import Sequence

from scripts.gateway_checks import aiperf, lm_evaluation, schemathesis
from scripts.gateway_checks.program import CheckFailed
from scripts.processes import end_on_sigterm, odriver

QUIET = ("--log-level", "warning")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of them, or all; the exit code."""
    options = _options(arguments)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="odriver-") as directory:
        address = f"ipc://{directory}/o.sock"
        with (
            odriver("serve", "--bind", address, *QUIET),
            odriver("gateway", "--connect", address, "--port", "0", *QUIET) as web,
        ):
            try:
                _check(web.status, options)
            except CheckFailed as error:
                print(f"scripts/check_gateway: {error}", file=sys.stderr)
                return 1
    return 0


def _check(url: str, options: argparse.Namespace) -> None:
    if options.program in ("schemathesis", "all"):
        schemathesis.check(url, options.examples)
    if options.program in ("aiperf", "all"):
        aiperf.check(url, options.requests)
    if options.program in ("lm-eval", "all"):
        lm_evaluation.check(url, options.torch_python)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/check_gateway", description="Let programs that others wrote use the gateway of the model we ship."
    )
    add = parser.add_argument
    add("program", choices=["schemathesis", "lm-eval", "aiperf", "all"], help="which; each is installed when first run")
    add("--examples", type=int, default=100, metavar="N", help="schemathesis's, of each operation (default: 100)")
    add("--requests", type=int, default=500, metavar="N", help="aiperf's, of each kind (default: 500)")
    add("--torch-python", metavar="PATH", help="a Python that has torch and transformers, to compare lm-eval's with")
    options = parser.parse_args(arguments)
    if options.program in ("lm-eval", "all") and options.torch_python is None:
        parser.error("lm-eval's log-likelihoods are compared with transformers': give --torch-python PATH")
    return options


if __name__ == "__main__":
    sys.exit(main())
