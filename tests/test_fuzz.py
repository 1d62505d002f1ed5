"""A short run of `scripts/bench fuzz`, with a driver that one can compute in one's head."""

from pathlib import Path
from random import Random

from fake_driver import serving
from fakes import FakeEngine, FakeTokenizer
from gateways import gateway

from driver.odriver import oDriver
from engine.sampling_params import SamplingParams
from scripts.benchmarks.endurance.fuzz import GoodPeer, attack, decode_mutated
from scripts.benchmarks.endurance.generated import EDGES, HOSTILE, ask_by_http, ask_by_zeromq, fields


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


def test_whatever_is_asked_has_an_end(tmp_path: Path) -> None:
    """Requests of values that are valid, at an edge or hostile, through both doors; none of them is open at the end."""
    address = f"ipc://{tmp_path}/o.sock"
    driver = oDriver(FakeEngine(), FakeTokenizer())
    driver.start()
    with serving(address, driver), gateway(address) as http:
        assert ask_by_zeromq(address, 500, seed=1) == 0
        assert ask_by_http(http.base_url.netloc.decode(), 500, seed=2) == 0

        while driver.status().open_requests:
            pass
    driver.stop("the test is over")


def test_every_field_is_asked_for_in_every_way() -> None:
    """Valid values, edges and hostile ones, of each parameter."""
    rng = Random(0)
    drawn = [fields(rng, SamplingParams) for _ in range(2000)]

    for name in SamplingParams.__struct_fields__:
        values = [one[name] for one in drawn if name in one]
        assert any(value in EDGES for value in values if value == value)
        assert len({repr(value) for value in values} & {repr(value) for value in HOSTILE}) > 5
