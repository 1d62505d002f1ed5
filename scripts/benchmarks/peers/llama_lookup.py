"""llama.cpp's decoding with drafts that it looks up in the prompt: its program llama-lookup, once for each prompt."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from scripts.benchmarks.figures.figure import MeasurementFailed
from scripts.benchmarks.peers.gguf_file import write_gguf

CONTEXT = 1024
"""Tokens of prompt and answer."""
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+([0-9.]+) seconds")
TOKEN = re.compile(r"<(\d+)>")


class Decoded(msgspec.Struct, frozen=True):
    """What it said, and how fast."""

    token_ids: list[int]
    rate: float
    """Tokens a second of decoding alone: neither its start nor the reading of the prompt is in it."""


class LlamaLookup:
    """The program on one model."""

    def __init__(self, program: str, gguf: Path) -> None:
        self._command = [program, "-m", str(gguf), "-t", str(len(os.sched_getaffinity(0))), "-c", str(CONTEXT)]
        self._command += ["--temp", "0", "--ignore-eos", "--no-escape"]

    def decode(self, prompt: list[int], max_tokens: int, drafts: int) -> Decoded:
        """The greedy answer, with up to so many drafts a step. Raises MeasurementFailed where the program fails."""
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write("".join(f"<{token}>" for token in prompt))
            file.flush()
            asked = ["-f", file.name, "-n", str(max_tokens), "--spec-draft-n-max", str(drafts)]
            ended = subprocess.run(
                [*self._command, *asked], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        decoded = DECODED.search(ended.stdout + ended.stderr)
        if ended.returncode or decoded is None:
            raise MeasurementFailed(f"{self._command[0]} ended with exit code {ended.returncode}:\n{ended.stderr}")
        said = [int(token) for token in TOKEN.findall(ended.stdout)]
        if said[: len(prompt)] != prompt:
            raise MeasurementFailed(f"{self._command[0]} read another prompt than it was given")
        return Decoded(said[len(prompt) :], int(decoded[1]) / float(decoded[2]))


@contextmanager
def llama_lookup(program: str, model: Path) -> Iterator[LlamaLookup]:
    """``program`` is llama-lookup; its file of the model is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="odriver-bench-") as directory:
        path = Path(directory, "model.gguf")
        write_gguf(model, path)
        yield LlamaLookup(program, path)
