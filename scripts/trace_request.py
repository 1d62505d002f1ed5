"""python trace_request.py TREE MODULE: counts the modules whose functions a request and a step run.

Knows as little as it can of the tree that it runs in, which may be an old one: MODULE is where its tokenizer is.
"""

import importlib
import os
import sys
import threading
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any

PRODUCTION = ("caching", "engine", "driver", "ipc")
MAX_TOKENS = 16
STEP = "oEngine.step"


class Tracer:
    """Sees the calls of every thread that begins after it was given to ``threading.setprofile``."""

    def __init__(self, tree: Path) -> None:
        self.files: set[str] = set()
        """The tree's files whose functions have been called."""
        self.steps: list[set[str]] = []
        """The same of each step."""
        self._roots = tuple(f"{tree / name}{os.sep}" for name in PRODUCTION)
        self._stepping: int | None = None  # the thread that is in a step

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Notes the file of a call; what a step calls belongs to the step, too."""
        del argument
        code = frame.f_code
        if not code.co_filename.startswith(self._roots):
            return
        if code.co_qualname == STEP:
            if event == "call":
                self._stepping = threading.get_ident()
                self.steps.append(set())
            elif event == "return":
                self._stepping = None
        if event == "call":
            self.files.add(code.co_filename)
            if self._stepping == threading.get_ident():
                self.steps[-1].add(code.co_filename)


def main(tree: str, tokenizer: str) -> None:
    """Prints how many modules the request ran, and how many the middle one of its steps."""
    sys.path.insert(0, tree)
    build, config, odriver, request = map(
        importlib.import_module, ("engine.build", "engine.config", "driver.odriver", "driver.request")
    )
    settings = config.EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_pages=64, max_model_len=256)
    engine = build.build_engine(settings, lambda _: None)
    driver = odriver.oDriver(
        engine, importlib.import_module(tokenizer).HuggingFaceTokenizer(Path(tree) / "engine/models/demo")
    )
    tracer = Tracer(Path(tree).resolve())
    channel = request.QueueChannel()
    params = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    threading.setprofile(tracer)  # the driver's threads
    driver.start()
    sys.setprofile(tracer)  # the caller's
    driver.submit_request(
        request.ActiveRequest(request_id="traced", channel=channel, prompt="Once upon a time", params=params)
    )
    last = list(channel)[-1]
    sys.setprofile(None)
    driver.stop("traced")
    if last.error is not None:
        raise RuntimeError(f"the traced request failed: {last.error}")
    print(len(tracer.files), median_low(map(len, tracer.steps)))


if __name__ == "__main__":
    main(*sys.argv[1:])
