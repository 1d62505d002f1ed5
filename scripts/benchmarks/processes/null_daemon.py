"""A child that serves the null model to real clients over a real socket: all of the daemon but the device.

To whatever it is asked it answers how many seconds of processor time its threads have used together so far.
"""

import resource
import sys

from driver.odriver import oDriver
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.hub.names import DEMO_MODEL
from ipc.server.zmq_server import Server
from scripts.benchmarks.processes.child import answer_all
from scripts.benchmarks.processes.null_model import null_engine


def main() -> None:
    """Serve at an address, given with the number of sequences that may run at once, until stdin ends."""
    address, max_num_seqs = sys.argv[1], int(sys.argv[2])
    server = Server(address, on_failure=sys.exit, on_drain=sys.exit, on_reload=sys.exit, on_log_level=sys.exit)
    server.start()
    engine = null_engine(max_num_seqs)
    driver = oDriver(engine, HuggingFaceTokenizer(DEMO_MODEL), on_failure=sys.exit)
    driver.start()
    server.open(driver, "null", engine.limits)
    answer_all(lambda _: _cpu_seconds())
    driver.stop("measured")
    server.stop()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
