"""schemathesis: requests drawn from ``/openapi.json``, and that every answer is as it says."""

import tempfile
from pathlib import Path

from scripts.gateway_checks.program import Program

SCHEMATHESIS = Program("schemathesis", "schemathesis==4.32.5")
EXCLUDED = "positive_data_acceptance"
"""A body may be as the schema says and still be refused with 400: a grammar that is none, a token id that there is not."""


def check(url: str, examples: int) -> None:
    """So many examples of each operation; raises CheckFailed."""
    with tempfile.TemporaryDirectory() as directory:
        SCHEMATHESIS.run(
            *("run", f"{url}/openapi.json", "--exclude-checks", EXCLUDED, "--max-examples", str(examples)),
            *("--seed", "0", "--generation-database", "none", "--request-timeout", "60"),
            within=Path(directory),
        )
