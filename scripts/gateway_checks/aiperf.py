"""aiperf: a load of chats and of texts, and that no request of it fails."""

import json
import tempfile
from pathlib import Path

from engine.hub.names import DEMO_MODEL
from scripts.gateway_checks.program import CheckFailed, Program

AIPERF = Program("aiperf", "aiperf==0.13.0")
AT_ONCE = 32
INPUT, OUTPUT = 64, 64
SHOWN = ("output_token_throughput", "time_to_first_token", "inter_token_latency", "request_latency")


def check(url: str, requests: int) -> None:
    """So many of each kind, 32 at once; prints figures, and raises CheckFailed."""
    for kind in ("chat", "completions"):
        with tempfile.TemporaryDirectory() as directory:
            AIPERF.run(
                *("profile", "--model", "demo", "--url", url, "--endpoint-type", kind, "--streaming"),
                *("--concurrency", str(AT_ONCE), "--request-count", str(requests), "--random-seed", "0"),
                *("--tokenizer", str(DEMO_MODEL), "--synthetic-input-tokens-mean", str(INPUT)),
                *("--output-tokens-mean", str(OUTPUT), "--extra-inputs", "ignore_eos:true"),
                *("--artifact-dir", directory, "--ui-type", "none"),
                within=Path(directory),
            )
            (report,) = Path(directory).rglob("profile_export_aiperf.json")
            told = json.loads(report.read_text(encoding="utf-8"))
        failed = (told.get("error_request_count") or {"avg": 0})["avg"]
        completed = told["request_count"]["avg"]
        print(f"{kind}: {completed:.0f} requests completed, {failed:.0f} failed")
        for name in SHOWN:
            print(f"  {name}: {told[name]['avg']:.1f} {told[name]['unit']} on average")
        if failed or completed != requests:
            raise CheckFailed(f"{failed:.0f} of {requests} requests failed: {told.get('error_summary')}")
