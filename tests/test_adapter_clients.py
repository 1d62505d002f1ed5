"""Adapters as clients, tenants, operators and HTTP have them: real sockets and threads, on an engine that knows its own."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fake_driver import serving
from fakes import FakeEngine
from gateways import CHAT, TEXT, chat, events, gateway
from openai.types import Model
from test_adapters import build

from driver.odriver import oDriver
from ipc.async_client import AsyncClient
from ipc.client import Client
from ipc.commands import cli
from ipc.control_client import ControlClient
from ipc.errors import RequestFailed
from ipc.gateway.access.callers import Callers
from ipc.gateway.upstream.remote_daemon import RemoteDaemon
from ipc.sockets.auth import Authority
from ipc.wire import keys

OPS, ALICE = {"Authorization": "Bearer sk-ops-0123456789ab"}, {"Authorization": "Bearer sk-alice-0123456789"}
API_KEYS = """
[ops]
api_key = "sk-ops-0123456789ab"
operator = true

[alice]
api_key = "sk-alice-0123456789"
"""


@pytest.fixture
def engine() -> FakeEngine:
    """What the daemon's driver has."""
    return FakeEngine()


@pytest.fixture
def driver(tmp_path: Path, engine: FakeEngine) -> Iterator[oDriver]:
    """A driver with the directories ``alice``, ``bob``, ``carol`` and ``bad`` for adapters, and none loaded."""
    (tmp_path / "root").mkdir()
    with build(tmp_path / "root", engine) as driver:
        yield driver


@pytest.fixture
def served(address: str, driver: oDriver) -> Iterator[str]:
    """The address of a daemon that serves it."""
    with serving(address, driver, model="base", aliases=["alias"], enable_lora=True):
        yield address


@pytest.fixture
def http(tmp_path: Path, served: str) -> Iterator[httpx.Client]:
    """An operator's client of a gateway."""
    path = tmp_path / "api-keys.toml"
    path.touch(0o600)
    path.write_text(API_KEYS)
    with gateway(served, callers=Callers(path)) as http:
        http.headers.update(OPS)
        yield http


def adapter_ids(engine: FakeEngine) -> list[int]:
    """Those of the sequences that the engine got."""
    return [sequence.adapter_id for sequence in engine.admitted]


def test_clients_name_an_adapter(served: str, engine: FakeEngine) -> None:
    """In a request, or for all requests of a client; tokenizers are asked by the same names, and whoever errs is told."""
    with ControlClient(served) as control, Client(served) as client:
        assert control.load_adapter("mine", "alice", pin=True) == "the adapter mine is loaded: version 1, of rank 1"
        assert client.welcome.enable_lora
        client.complete("ab", max_tokens=1, model="mine")
        whose = client.of_model("mine")
        whose.complete("ab", max_tokens=1)
        list(whose.chat([{"role": "user", "content": "a"}], max_tokens=1))
        whose.complete("ab", max_tokens=1, model="")
        client.complete("ab", max_tokens=1, model="alias")
        assert (whose.model, client.model) == ("mine", "base")
        assert whose.detokenize(whose.tokenize("ab")) == "ab"
        for ask in (client.complete, client.tokenize):
            with pytest.raises(RequestFailed, match="'yours' is served here: there are base, alias, mine") as refused:
                ask("ab", model="yours")
            assert refused.value.code == "not_found"
        (row,) = client.adapters()
        assert row | {"loaded_at": 0} == {
            "name": "mine", "path": "alice", "version": 1, "rank": 1, "num_bytes": 1, "pinned": True, "loaded_at": 0,
            "open_requests": 0,
        }  # fmt: skip
        assert control.adapters() == [row]
        assert control.unload_adapter("mine") == "the adapter mine is unloaded"
        assert client.adapters() == []
        with pytest.raises(RequestFailed, match="is loaded already") as refused:
            control.load_adapter("mine", "alice")
            control.load_adapter("mine", "alice", replace=False)

    assert adapter_ids(engine) == [1, 1, 1, 0, 0]


def test_asynchronous_clients_name_one(served: str, engine: FakeEngine) -> None:
    """In the same way; the connection lives as long as whoever has one with a name."""

    async def ask() -> list[str]:
        async with AsyncClient(served) as client:
            named = client.of_model("alice").on_behalf_of("somebody")
            await named.complete("ab", max_tokens=1)
            return [row["name"] for row in await named.adapters()]

    with ControlClient(served) as control:
        control.load_adapter("alice")
    named = Client(served).of_model("alice")  # nobody holds the client itself

    assert asyncio.run(ask()) == ["alice"]
    assert named.complete("ab", max_tokens=1).text == "a"
    named.close()
    assert adapter_ids(engine) == [1, 1]


def test_an_open_request_is_listed_with_its_adapter(served: str, driver: oDriver) -> None:
    """And one of the model itself by the model's first name; status counts them."""
    with ControlClient(served) as control:
        control.load_adapter("alice")
        control.load_adapter("bob")
        with Client(served) as client:
            streams = [client.generate("ab", max_tokens=200, model=model) for model in ("alice", "alias")]
            rows, _ = control.requests()
            assert {row["model"] for row in rows} <= {"alice", "base"}
            assert set(control.status()["adapters"]) == {"alice", "bob"}
            for stream in streams:
                list(stream)
    assert driver.status().adapters == {"alice": 0, "bob": 0}


def test_a_key_uses_the_adapters_that_it_may(tmp_path: Path, address: str, driver: oDriver, engine: FakeEngine) -> None:
    """By default none, as of others it does not even learn the names; one for control uses all, and alone loads them."""
    allowed = {"alice": ["alice", "both"], "bob": ["bob", "both"], "carol": [], "dave": ["*"]}
    path = {name: tmp_path / f"{name}.key" for name in (*allowed, "ops", "plain")}
    for name, adapters in allowed.items():
        keys.new(tmp_path / "keys", name, path[name], adapters=adapters)
    keys.new(tmp_path / "keys", "ops", path["ops"], control=True)
    keys.new(tmp_path / "keys", "plain", path["plain"])
    everything = {"alice", "bob", "both"}
    with (
        serving(address, driver, model="base", authority=Authority(tmp_path / "keys"), enable_lora=True),
        ExitStack() as clients,
    ):
        client = {name: clients.enter_context(Client(address, key=key)) for name, key in path.items()}
        control = {name: clients.enter_context(ControlClient(address, key=key)) for name, key in path.items()}
        for name in everything:
            control["ops"].load_adapter(name, "carol")
        for name in path:
            mine = {"ops": everything, "plain": set(), "dave": everything}.get(name) or set(allowed.get(name, []))
            for listing in (client[name].adapters(), control[name].adapters()):
                assert {row["name"] for row in listing} == mine
            for adapter in everything:
                if adapter in mine:
                    client[name].complete("x", max_tokens=1, model=adapter)
                    continue
                with pytest.raises(RequestFailed) as refused:
                    client[name].complete("x", max_tokens=1, model=adapter)
                served = ", ".join(["base", "alias", *sorted(mine)])
                assert refused.value.message.endswith(f"there are {served}") and refused.value.code == "not_found"
            if name != "ops":
                for command in (control[name].load_adapter, control[name].unload_adapter):
                    with pytest.raises(RequestFailed, match="may not control"):
                        command("alice")
    assert len(engine.admitted) == 2 + 2 + 3 + 3


def test_adapters_are_commanded_from_a_shell(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaded, listed, used and unloaded; what is refused is an error."""

    def odriver(*arguments: str) -> tuple[int, str]:
        code = cli.main([*arguments, "--connect", served])
        out, err = capsys.readouterr()
        return code, out + err

    assert odriver("adapters", "list") == (0, "no adapters are loaded\n")
    assert odriver("adapters", "load", "mine", "alice", "--pin") == (
        0,
        "the adapter mine is loaded: version 1, of rank 1\n",
    )
    assert odriver("complete", "ab", "--max-tokens", "3", "--model", "mine") == (0, "aba\n")
    code, text = odriver("complete", "ab", "--model", "yours")
    assert code == 1 and "no model or adapter 'yours' is served here" in text
    assert [row["name"] for row in json.loads(odriver("adapters", "list", "--json")[1])] == ["mine"]
    code, table = odriver("adapters", "list")
    assert code == 0 and "mine" in table and "alice" in table
    assert odriver("adapters", "load", "../../etc")[0] == 1
    assert odriver("adapters", "load", "mine", "/etc") == (
        1,
        "odriver: the adapter mine cannot be served: /etc is not below adapter_root, and nothing else is read\n",
    )
    assert odriver("adapters", "unload", "mine") == (0, "the adapter mine is unloaded\n")
    assert odriver("adapters", "unload", "mine")[0] == 1


def test_a_model_of_http_is_an_adapter(http: httpx.Client, engine: FakeEngine) -> None:
    """Loaded, used in every API, listed and unloaded as in vLLM; answers carry its name."""
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "alice"}).status_code == 200
    bodies = {
        TEXT: {"prompt": "ab", "max_tokens": 1},
        CHAT: chat("ab", max_tokens=1),
        "/v1/responses": {"input": "ab", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        answer = http.post(path, json={**body, "model": "mine"}, headers=ALICE)
        assert (answer.status_code, answer.json()["model"]) == (200, "mine")
    chunks = events(http.post(CHAT, json={**bodies[CHAT], "model": "mine", "stream": True}))
    assert {chunk["model"] for chunk in chunks} == {"mine"}
    echo = http.post(TEXT, json={"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 0, "model": "mine"})
    assert echo.json()["choices"][0]["text"] == "ab"
    assert http.post("/tokenize", json={"prompt": "ab", "model": "mine"}).json()["count"] == 2
    assert http.post("/detokenize", json={"tokens": [97], "model": "mine"}).json() == {"prompt": "a"}
    assert http.get("/tokenizer_info?model=mine").status_code == 200
    assert set(adapter_ids(engine)) == {1}

    models = [Model.model_validate(one).model_dump() for one in http.get("/v1/models", headers=ALICE).json()["data"]]
    told = [(one["id"], one["root"], one["parent"]) for one in models]
    assert told == [("base", "base", None), ("alias", "base", None), ("mine", "alice", "base")]
    assert http.get("/v1/models/mine").json()["parent"] == "base"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    for path, body in bodies.items():
        answer = http.post(path, json={**body, "model": "mine"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"], error["type"]) == (
            404,
            "model_not_found",
            "model",
            "not_found_error",
        )
        assert "there are base, alias" in error["message"]
    assert http.get("/v1/models/mine").status_code == 404
    for method, path, body in (
        ("POST", "/tokenize", {"prompt": "ab", "model": "mine"}),
        ("POST", "/detokenize", {"tokens": [97], "model": "mine"}),
        ("GET", "/tokenizer_info?model=mine", None),
    ):
        assert http.request(method, path, json=body).status_code == 404


def test_metrics_show_a_caller_of_http_no_adapter_that_its_key_may_not_use(
    tmp_path: Path, address: str, driver: oDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That others' run and wait is nothing it may know; an operator sees all."""

    async def metrics(_: RemoteDaemon) -> str:
        return 'vllm:lora_requests_info{running_lora_adapters="alice,bob",waiting_lora_adapters="bob"} 1.0\n'

    monkeypatch.setattr(RemoteDaemon, "metrics", metrics)
    for name, rights in (("alice", {"adapters": ["alice"]}), ("ops", {"control": True})):
        keys.new(tmp_path / "keys", name, tmp_path / f"{name}.key", **rights)
    ops, path = tmp_path / "ops.key", tmp_path / "api-keys.toml"
    path.touch(0o600)
    path.write_text(f'{API_KEYS}key = "{tmp_path}/alice.key"\n')
    with (
        serving(address, driver, model="base", authority=Authority(tmp_path / "keys"), enable_lora=True),
        ControlClient(address, key=ops) as control,
        gateway(address, callers=Callers(path, key=ops), key=ops) as http,
    ):
        for name in ("alice", "bob"):
            control.load_adapter(name)
        shown = [http.get("/metrics", headers=headers).text for headers in (ALICE, OPS)]

    assert 'running_lora_adapters="alice",waiting_lora_adapters=""' in shown[0]
    assert 'running_lora_adapters="alice,bob",waiting_lora_adapters="bob"' in shown[1]


def test_operators_of_http_are_told_what_is_wrong(http: httpx.Client) -> None:
    """In OpenAI's shape; nothing else changes, and nobody else is heard."""
    there = {"lora_name": "there", "lora_path": "alice"}
    assert http.post("/v1/load_lora_adapter", json=there).status_code == 200
    for command, body, status in (
        ("load", {"lora_name": "a", "lora_path": "/etc"}, 400),
        ("load", {"lora_name": "a", "lora_path": "bad"}, 400),
        ("load", {"lora_name": "a", "lora_path": "alice/../../secret"}, 400),
        ("load", {"lora_name": "../a", "lora_path": "alice"}, 400),
        ("load", {"lora_name": "base", "lora_path": "alice"}, 400),
        ("load", there, 400),
        ("load", {**there, "load_inplace": True}, 200),
        ("load", {"lora_name": "a", "lora_path": "alice", "is_3d_lora_weight": True}, 400),
        ("load", {"lora_path": "alice"}, 400),
        ("unload", {"lora_name": "a"}, 404),
        ("unload", {"lora_name": "there"}, 200),
        ("load", {"lora_name": "alice"}, 200),
    ):
        url = f"/v1/{command}_lora_adapter"
        assert http.post(url, json=body, headers=ALICE).status_code == 403
        answer = http.post(url, json=body)
        assert answer.status_code == status and (status == 200 or answer.json()["error"]["message"])
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["base", "alias", "alice"]


def test_a_gateway_finds_the_daemon_that_has_an_adapter(tmp_path: Path) -> None:
    """Of several; an adapter that none has is told with all that there are."""
    with ExitStack() as stack:
        drivers, engines, addresses = {}, {}, []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            engines[name] = FakeEngine()
            drivers[name] = stack.enter_context(build(tmp_path / name, engines[name]))
            addresses.append(f"ipc://{tmp_path}/{name}.sock")
            stack.enter_context(serving(addresses[-1], drivers[name], model=name, enable_lora=True))
            with ControlClient(addresses[-1]) as control:
                control.load_adapter(f"of-{name}", "alice")
        http = stack.enter_context(gateway(*addresses))
        for name in ("one", "two", "two"):
            answer = http.post(TEXT, json={"prompt": "x", "max_tokens": 1, "model": f"of-{name}"})
            assert answer.json()["model"] == f"of-{name}"
        assert [adapter_ids(engine) for engine in engines.values()] == [[1], [1, 1]]
        refused = http.post(TEXT, json={"prompt": "x", "model": "nobody"})
        assert refused.status_code == 404 and "one and two are served here" in refused.json()["error"]["message"]


def test_lines_of_a_batch_name_adapters(tmp_path: Path, served: str, engine: FakeEngine) -> None:
    """As they name the model; one that is not served is that line's error."""
    lines = [
        {"custom_id": name, "method": "POST", "url": TEXT, "body": {"model": name, "prompt": "ab", "max_tokens": 1}}
        for name in ("alice", "base", "nobody")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with ControlClient(served) as control:
        control.load_adapter("alice")

    assert cli.main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--connect", served]) == 1

    found = {
        (line := json.loads(text))["custom_id"]: line["response"]
        for text in (tmp_path / "out.jsonl").read_text().splitlines()
    }
    assert {name: one["status_code"] for name, one in found.items()} == {"alice": 200, "base": 200, "nobody": 404}
    assert found["alice"]["body"]["model"] == "alice" and sorted(adapter_ids(engine)) == [0, 1]
