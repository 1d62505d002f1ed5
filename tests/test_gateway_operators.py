"""What operators do over HTTP, and that nobody else does."""

from pathlib import Path

import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import gateway

from ipc.gateway.access.callers import Callers
from ipc.gateway.operations import OPERATIONS
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.sockets.auth import Authority
from ipc.wire import keys

ALICE, OPS = {"Authorization": "Bearer sk-alice-0123456789"}, {"Authorization": "Bearer sk-ops-0123456789ab"}
FILE = """
[alice]
api_key = "sk-alice-0123456789"

[ops]
api_key = "sk-ops-0123456789ab"
operator = true
"""
COMMANDS = [one.path for one in OPERATIONS if one.for_operators]


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    """A caller, and an operator."""
    path = tmp_path / "api-keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


def test_an_operator_puts_a_daemon_to_sleep_and_wakes_it(address: str, driver: FakeDriver, api_keys: Path) -> None:
    """The answer is the daemon's, when it is done; whether it sleeps is told to every caller."""
    with gateway(address, callers=Callers(api_keys)) as http:
        told = []
        for path in ("/sleep?level=1", "/wake_up", "/reset_prefix_cache?model=parrot&reset_external=true"):
            answer = http.post(path, headers=OPS)
            sleeping = http.get("/is_sleeping", headers=ALICE).json()
            told.append((answer.status_code, answer.json(), sleeping["is_sleeping"]))

    assert told == [
        (200, {"level": 1, "message": "asleep", "status": "sleeping"}, True),
        (200, {"status": "awake", "tags": None, "message": "serving"}, False),
        (200, {"message": "forgotten", "success": True}, False),
    ]
    assert driver.state == "serving"


def test_nobody_else_commands_a_daemon(address: str, driver: FakeDriver, api_keys: Path) -> None:
    """No other caller of the file, nobody with the key of all, and nobody of this machine where no key is asked for."""
    shared = {"Authorization": "Bearer shared-key"}
    for callers, headers, status in (
        (Callers(api_keys), {}, 401),
        (Callers(api_keys), ALICE, 403),
        (Callers(api_key="shared-key"), shared, 403),
        (Callers(api_keys, api_key="shared-key"), shared, 403),
        (Callers(), {}, 403),
    ):
        with gateway(address, callers=callers) as http:
            assert {http.post(path, headers=headers).status_code for path in COMMANDS} == {status}
    assert driver.state == "serving" and len(COMMANDS) > 3


def test_the_daemon_has_the_last_word(address: str, tmp_path: Path, api_keys: Path) -> None:
    """An operator with a key of its own there needs one for control, whatever the gateway's own may."""
    for name in ("ops", "gate"):
        keys.new(tmp_path / "keys", name, tmp_path / f"{name}.key", control=name == "gate")
    driver, own = FakeDriver(), tmp_path / "gate.key"
    with serving(address, driver, authority=Authority(tmp_path / "keys")):
        with gateway(address, callers=Callers(api_keys, own), key=own) as http:
            assert http.post("/sleep", headers=OPS).status_code == 200
        api_keys.write_text(FILE + 'key = "ops.key"\n')
        with gateway(address, callers=Callers(api_keys, own), key=own) as http:
            refused = http.post("/wake_up", headers=OPS)

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert driver.state == "asleep"


def test_commands_refuse_what_they_would_not_read(address: str, driver: FakeDriver, api_keys: Path) -> None:
    """A parameter that they do not have, a value that is none, a body, and a model that is not served."""
    with gateway(address, callers=Callers(api_keys)) as http:
        answers = [
            http.post("/sleep?depth=1", headers=OPS),
            http.post("/sleep?level=7", headers=OPS),
            http.post("/sleep?mode=abort", headers=OPS),
            http.post("/reset_prefix_cache?reset_running_requests=true", headers=OPS),
            http.post("/reset_prefix_cache?reset_external=all", headers=OPS),
            http.post("/sleep", headers=OPS, json={"level": 1}),
            http.post("/sleep?model=owl", headers=OPS),
        ]

    assert [(one.status_code, one.json()["error"]["param"]) for one in answers] == [
        (400, "depth"),
        (400, "level"),
        (400, "mode"),
        (400, "reset_running_requests"),
        (400, "reset_external"),
        (400, None),
        (404, "model"),
    ]
    assert driver.state == "serving"


def test_a_command_is_for_all_daemons(tmp_path: Path, api_keys: Path) -> None:
    """Or for those that serve the model that it names; one that is away is an error, and the others have done it."""
    owl, parrot = FakeDriver(), FakeDriver()
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in ("owl", "parrot", "nobody")]
    with serving(addresses[0], owl, model="owl"), serving(addresses[1], parrot):
        with gateway(*addresses[:2], callers=Callers(api_keys)) as http:
            assert http.post("/sleep?model=owl", headers=OPS).json()["message"] == "asleep"
            assert (owl.state, parrot.state) == ("asleep", "serving")
            assert http.get("/is_sleeping", headers=OPS).json() == {"is_sleeping": False}
            assert http.post("/sleep", headers=OPS).json()["message"] == "asleep\nasleep"
            assert http.get("/is_sleeping", headers=OPS).json() == {"is_sleeping": True}
        with gateway(*addresses, timeout=0.5, callers=Callers(api_keys)) as http:
            while (owl.state, parrot.state) != (
                "serving",
                "serving",
            ):  # on a busy machine it takes longer to reach both
                assert http.post("/wake_up", headers=OPS).status_code == 503


def test_a_command_for_a_model_is_for_its_daemons_that_are_away_too(tmp_path: Path, api_keys: Path) -> None:
    """It is an error then, as the replicas would differ; those that are there have done it."""
    there = FakeDriver()
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in ("there", "going")]
    remote = [RemoteDaemon(addresses[0], timeout=PATIENCE), RemoteDaemon(addresses[1], timeout=0.5)]
    with serving(addresses[0], there), gateway(*remote, callers=Callers(api_keys)) as http:
        with serving(addresses[1], FakeDriver()):
            while remote[1].model is None:
                pass
        while remote[1].client._connection.is_up:
            pass
        assert http.post("/sleep?model=parrot", headers=OPS).status_code == 503
    assert there.state == "asleep"
