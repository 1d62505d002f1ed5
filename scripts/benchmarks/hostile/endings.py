"""What is attacked last, as it ends a daemon or comes before it has begun."""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from ipc.control_client import ControlClient
from ipc.errors import OdriverError
from scripts.benchmarks.hostile.grammars import FORM
from scripts.benchmarks.hostile.peer import Peer, generate
from scripts.benchmarks.hostile.registry import DAEMON, KEYED
from scripts.benchmarks.hostile.stand import LIMITED, Stand, until
from scripts.benchmarks.processes.daemon import environment

PROMPT, TOKENS = "Once upon a time", 800
HANG_UPS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Seconds after a process has got to our first line: before, it is Python's to die of a signal."""
GRACE = 5.0
"""Seconds in which whoever a dead daemon leaves behind has to be gone."""


def drain_without_end(stand: Stand) -> str:
    """M5: what is open is finished, and the exit code is that of an end in order; else what was not so."""
    try:
        with ControlClient(stand.daemon.address) as control:
            pieces = stand.control.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            next(pieces)
            control.drain(math.inf)
            tokens = sum(len(piece.token_ids) for piece in pieces)
        code = stand.daemon.process.wait(30)
    except (OdriverError, subprocess.TimeoutExpired) as error:
        return f"a drain without end: {error}"
    return "" if code == os.EX_OK and tokens else f"a drain without end ends with exit code {code}"


def orphans(stand: Stand) -> str:
    """M7: those that a killed daemon leaves behind; empty if there are none for long."""
    with Peer(stand.doors[KEYED]) as peer:
        for number in range(6):
            peer.say(generate(f"g{number}", structured_outputs=FORM, n=64, max_tokens=900))
        time.sleep(3.0)
        children = psutil.Process(stand.daemon.pid).children(recursive=True)
        stand.daemon.process.kill()
        _, alive = psutil.wait_procs(children, GRACE)
    return f"{len(alive)} of {len(children)} children outlive a killed daemon" if alive else ""


def hang_up_on_start() -> str:
    """LOW: a server that is told to read its files again before it has read them; empty if it goes on."""
    for after in HANG_UPS:
        process = subprocess.Popen(
            [sys.executable, "-c", LIMITED, "serve", "--bind", f"ipc:///tmp/odriver-hostile-{os.getpid()}.sock"],
            env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            if left := until(partial(_dies_of_hang_up, process.pid), GRACE):
                return left
            time.sleep(after)
            process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
            if process.poll() == -signal.SIGHUP:
                return f"SIGHUP {after:g} s after its start ends a daemon"
        finally:
            process.kill()
            process.wait()
    return ""


def _dies_of_hang_up(pid: int) -> str:
    """Whether the process neither ignores SIGHUP nor has something to do for it, in words."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigIgn:", "SigCgt:"))]
    bears = any(mask >> (signal.SIGHUP - 1) & 1 for mask in masks)
    return "" if bears else "SIGHUP ends a daemon that starts"


ENDINGS = {DAEMON: ("M5: a drain without end", drain_without_end), KEYED: ("M7: children of a killed daemon", orphans)}
"""By what they end."""
