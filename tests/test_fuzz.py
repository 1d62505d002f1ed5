"""A short run of `scripts/bench fuzz`, with a driver that one can compute in one's head."""

from pathlib import Path

from fake_driver import serving
from fakes import FakeEngine, FakeTokenizer

from driver.odriver import oDriver
from scripts.benchmarks.fuzz import GoodPeer, attack, decode_mutated


def test_the_decoders_take_anything() -> None:
    """Some of it is a message after all; the rest is a MessageError and nothing else."""
    count = 5_000

    assert 0 < decode_mutated(count, seed=0) < 3 * count


def test_bad_peers_are_answered_and_good_ones_unharmed(tmp_path: Path) -> None:
    """Both sockets go on; nothing that was sent is open at the end."""
    address = f"ipc://{tmp_path}/o.sock"
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    with serving(address, driver):
        with GoodPeer(address) as good:
            assert attack(address, 5_000, seed=1) == 0

        assert good.answers > 0
        assert good.failures == 0
        while driver.status().open_requests:
            pass
    driver.stop("the test is over")
