"""``odriver serve --http``: a daemon and its gateway, two processes with one life. The driver is a fake one."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from daemons import News, build_daemon, gateway
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import CHAT, TEXT, chat, events
from test_cli import ENVIRONMENT, ODRIVER

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.exit_codes import FAULT, MISCONFIGURED, STOPPED
from engine.progress import Progress
from ipc.commands.cli import main
from ipc.control_client import ControlClient
from ipc.errors import AddressInUse, RequestFailed
from ipc.process.gateway_process import GatewayProcess
from ipc.service.configuration import DaemonConfig
from ipc.service.daemon import Daemon
from ipc.service.http_config import HttpConfig
from ipc.service.serve import _check_of_use
from ipc.service.settings import GATEWAY_OPTIONS, SETTINGS, configs, held, http_config

ROOT = Path(__file__).parent.parent


def run_with(daemon: Daemon, talk: Callable[[], Any], news: News) -> tuple[int, Any]:
    """The daemon's exit code, and what came of the talk, which begins when the daemon is ready."""

    def talk_when_ready() -> Any:
        news.until("READY=1")
        try:
            return talk()
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    with ThreadPoolExecutor(1) as thread:
        talking = thread.submit(talk_when_ready)
        code = daemon.run()
        return code, talking.result()


def gateways() -> list[psutil.Process]:
    """Those that this process has started, and that run."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it was just ending
            if any("ipc.gateway" in word for word in child.cmdline()):
                found.append(child)
    return found


def test_http_is_served_until_all_that_is_open_has_been_sent(address: str, news: News) -> None:
    """After SIGTERM: a stream comes to its end, what is new is refused meanwhile, and no process is left."""
    driver, http = FakeDriver(), gateway()

    def talk() -> tuple[str, int, str]:
        with httpx.Client(base_url=http.url, timeout=PATIENCE) as client:
            assert client.get("/ready").status_code == 200 and "oDriver" in client.get("/").text
            with ThreadPoolExecutor(1) as thread:
                asking = thread.submit(client.post, CHAT, json=chat("hold", stream=True))
                request = driver.take()
                os.kill(os.getpid(), signal.SIGTERM)
                while (refused := client.post(TEXT, json={"prompt": "new"})).status_code == 200:
                    pass
                driver.say(request, "the end", [1])
                driver.finish(request)
                told = events(asking.result())
            return str(told), refused.status_code, refused.json()["error"]["code"]

    code, (told, status, refusal) = run_with(build_daemon(address, driver, gateway=http), talk, news)

    assert code == STOPPED and "the end" in told and (status, refusal) == (503, "draining")
    assert gateways() == []


def test_the_gateways_end_is_the_daemons(address: str, news: News, caplog: pytest.LogCaptureFixture) -> None:
    """With an exit code that asks for a restart, and what was open is told why."""
    driver, http = FakeDriver(), gateway()
    open_requests: list[Any] = []

    def talk() -> None:
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(httpx.post, http.url + CHAT, json=chat("hold"), timeout=PATIENCE)
            open_requests.append(driver.take())
            (process,) = gateways()
            process.kill()
            assert isinstance(asking.exception(), httpx.TransportError)

    code, _ = run_with(build_daemon(address, driver, gateway=http), talk, news)

    assert code == FAULT and open_requests
    assert "the gateway was killed by SIGKILL" in caplog.text


def test_the_daemons_end_is_the_gateways(tmp_path: Path) -> None:
    """Even one by SIGKILL; the port is free again."""
    program = f"""
import logging, sys
logging.basicConfig(level=logging.INFO)
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from daemons import build_daemon, gateway
http = gateway()
build_daemon("ipc://{tmp_path}/o.sock", gateway=http).run()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        url = next(found[1] for line in daemon.stderr if (found := re.search(r"page (http://\S+)/", line)))
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        others = psutil.Process(daemon.pid).children(recursive=True)

        daemon.kill()

    assert psutil.wait_procs(others, PATIENCE)[1] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=PATIENCE)


def test_a_gateway_whose_daemon_has_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    """Though it could not serve, and has nobody to say so to: as when Ctrl-C comes twice while it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    options = {name: SETTINGS[name].default for name in GATEWAY_OPTIONS}
    options |= {"address": "ipc:///unused", "api_keys": str(tmp_path / "missing.toml")}
    with theirs, socket.create_server(("127.0.0.1", 0)) as listening:
        with ours:
            socket.send_fds(ours, [msgspec.msgpack.encode(options)], [listening.fileno()])
        program = f"from ipc.gateway.companion import main; raise SystemExit(main({theirs.fileno()}))"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (os.EX_CONFIG, "")


def test_it_is_told_how_far_the_start_is(address: str) -> None:
    """By /health, as a state that is not healthy yet; requests are told to come again."""
    http = gateway()
    told: list[httpx.Response] = []

    def ask(report: Callable[[Progress], None]) -> None:
        http.wait_until_settled()
        report(Progress("compiling", 3, 31, "functions"))
        told.extend(httpx.get(http.url + path, timeout=PATIENCE) for path in ("/health", "/ready", "/v1/models"))
        os.kill(os.getpid(), signal.SIGTERM)

    assert build_daemon(address, during_load=ask, gateway=http).run() == STOPPED

    (daemon,) = told[0].json()["daemons"]
    assert daemon["state"] == "starting" and daemon["detail"].endswith("is starting: compiling: 3 of 31 functions")
    assert [answer.status_code for answer in told] == [503] * 3 and "Retry-After" in told[2].headers
    assert "compiling: 3 of 31 functions" in told[2].json()["error"]["message"]


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(address: str) -> None:
    """In plain words; for the page alone any other port will do."""
    loaded: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = build_daemon(
            address, during_load=loaded.append, gateway=GatewayProcess("127.0.0.1", port, or_any_port=False)
        )
        with pytest.raises(AddressInUse, match=f"another program listens at 127.0.0.1, port {port}"):
            daemon.run()
        other = GatewayProcess("127.0.0.1", port, or_any_port=True)
        other.start(address, None, lambda code, how: None)
        try:
            assert other.url.rpartition(":")[2] not in ("0", str(port))
        finally:
            other.stop(0)
    assert loaded == []


def test_what_the_gateway_cannot_do_ends_the_start(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """It says why, and a restart would be of no use."""
    http = gateway(api_keys=Path("nowhere.toml"))

    assert (
        build_daemon(address, gateway=http, during_load=lambda report: http.wait_until_settled()).run() == MISCONFIGURED
    )
    assert "cannot read the API keys nowhere.toml" in caplog.text and gateways() == []


def test_a_key_is_asked_for(address: str, news: News, tmp_path: Path) -> None:
    """The one of all, and those of a file, which SIGHUP has read again; no command line has them."""
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    http = gateway(api_key="token-abc123", api_keys=path)

    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.post(http.url + TEXT, json={"prompt": "x"}, headers=headers, timeout=PATIENCE).status_code

    def talk() -> None:
        assert [status(None), status("token-abc124"), status("sk-0123456789abcdef")] == [401] * 3
        assert status("token-abc123") == 200
        path.write_text('[alice]\napi_key = "sk-0123456789abcdef"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        while status("sk-0123456789abcdef") != 200:
            pass
        assert all("token-abc123" not in word for process in gateways() for word in process.cmdline())
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_with(build_daemon(address, gateway=http), talk, news)[0] == STOPPED


def test_who_has_it_reloaded_is_told_of_the_api_keys(address: str, news: News, tmp_path: Path) -> None:
    """How many there are, and why they are what they were where the file is wrong."""
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)

    def talk() -> tuple[str, str]:
        with ControlClient(address) as control:
            path.write_text('[alice]\napi_key = "sk-0123456789abcdef"\n')
            told = control.reload()
            path.write_text("nonsense")
            with pytest.raises(RequestFailed) as refused:
                control.reload()
            control.drain()
        return told, refused.value.message

    code, (told, refused) = run_with(build_daemon(address, gateway=gateway(api_keys=path)), talk, news)

    assert code == STOPPED and told.endswith("; 1 API keys are known")
    assert refused.startswith(f"not reloaded: {path} holds no API keys") and "API keys are known" not in refused


def test_a_gateway_that_has_ended_holds_up_no_reload(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has no keys to read any more: as where what is open ends within a drain, and the daemon is reloaded then."""
    http, ended = gateway(), Event()
    with serving(address, FakeDriver()):
        http.start(address, None, lambda code, how: None)
        http.wait_until_settled()
        http.finish(ended.set)
        assert ended.wait(PATIENCE)

        assert [http.reload(), http.reload()] == ["", ""]
        http.log("debug", "text")
        http.stop(PATIENCE)

    assert "does not hear" not in caplog.text


def test_the_level_of_the_log_is_the_gateways_too(address: str, news: News, capfd: pytest.CaptureFixture[str]) -> None:
    """By ``odriver log-level``, and by a reload, which brings the form of its lines as well."""
    http = gateway()
    settings = DaemonConfig(bind=address)
    read = [DaemonConfig(bind=address, log_format="json"), settings]

    def until_it_logs(line: str) -> None:
        """A look that succeeds is logged at debug alone."""
        while line not in capfd.readouterr().err:
            httpx.get(f"{http.url}/version", timeout=PATIENCE)

    def talk() -> None:
        httpx.get(f"{http.url}/version", timeout=PATIENCE)
        httpx.post(http.url + TEXT, json={"prompt": "seen"}, timeout=PATIENCE)
        assert "GET /version" not in capfd.readouterr().err
        with ControlClient(address) as control:
            control.set_log_level("debug")
            until_it_logs("DEBUG ipc.gateway.request_id: 127.0.0.1 GET /version: 200")
            assert control.reload() == "reloaded: log_format"
            control.set_log_level("debug")
            until_it_logs('"level": "debug", "logger": "ipc.gateway.request_id"')
            control.drain()

    daemon = build_daemon(address, read=lambda: (EngineConfig(), read.pop(), HttpConfig()), gateway=http)
    assert run_with(daemon, talk, news)[0] == STOPPED


def test_pages_of_the_origins_that_the_operator_names_may_use_it(address: str, news: News) -> None:
    """The settings come to the gateway's process."""
    http = gateway(allowed_origins=("https://a.example",), allowed_methods=("GET",), allow_credentials=True)
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}

    def talk() -> list[str]:
        answer = httpx.options(f"{http.url}/v1/models", headers=headers, timeout=PATIENCE)
        with ControlClient(address) as control:
            control.drain()
        return [answer.headers[f"Access-Control-Allow-{name}"] for name in ("Origin", "Methods", "Credentials")]

    code, told = run_with(build_daemon(address, gateway=http), talk, news)

    assert (code, told) == (STOPPED, ["https://a.example", "GET", "true"])


def test_a_daemon_that_asks_for_keys_has_one_for_its_gateway(address: str, news: News, tmp_path: Path) -> None:
    """It may see how the daemon is; nobody else gets in by it, and the file is gone at the end."""
    directory = tmp_path / "keys"
    http = gateway()

    def talk() -> str:
        assert httpx.get(f"{http.url}/load", timeout=PATIENCE).json() == {"server_load": 0}
        text = httpx.post(http.url + TEXT, json={"prompt": "let in"}, timeout=PATIENCE).json()["choices"][0]["text"]
        os.kill(os.getpid(), signal.SIGTERM)
        return str(text)

    settings = DaemonConfig(bind=address, keys=directory)
    daemon = build_daemon(address, read=lambda: (EngineConfig(), settings, HttpConfig()), gateway=http)
    assert run_with(daemon, talk, news) == (STOPPED, "letin")
    assert list((directory / "clients").glob("*")) == []


def test_a_drain_by_control_ends_both(address: str, news: News) -> None:
    """As a signal does."""

    def talk() -> None:
        with ControlClient(address) as control:
            control.drain()

    assert run_with(build_daemon(address, gateway=gateway()), talk, news)[0] == STOPPED
    assert gateways() == []


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, None),
        ({"web": True}, ("127.0.0.1", 8000)),
        ({"http": "8001", "web": True}, ("127.0.0.1", 8001)),
        ({"http": "localhost:0"}, ("127.0.0.1", 0)),
        ({"http": "[::1]:80"}, ("::1", 80)),
        ({"http": "0.0.0.0:8000", "api_key": "x"}, ("0.0.0.0", 8000)),
    ],
)
def test_where_http_is_served(settings: dict[str, Any], address: tuple[str, int] | None) -> None:
    """Nowhere, unless it is asked for; for others only with a key."""
    assert HttpConfig(**settings).address == address


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"http": "0.0.0.0:8000"}, "anybody there could use the models"),
        ({"http": "here"}, "must be PORT or HOST:PORT"),
        ({"http": "::1"}, "must be PORT or HOST:PORT"),
        ({"http": "70000"}, "must be PORT or HOST:PORT"),
        ({"api_key": "a b"}, "api_key must be"),
        ({"max_connections": 0}, "max_connections must be"),
        ({"ssl_certfile": Path("nowhere.pem")}, "ssl_certfile: there is no file nowhere.pem"),
        ({"ssl_keyfile": Path(__file__)}, "set ssl_certfile as well"),
        ({"tool_call_parser": "x"}, "tool_call_parser must be"),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], words: str) -> None:
    """Before anything is done."""
    with pytest.raises(ConfigurationError, match=words):
        HttpConfig(**settings)


def test_a_certificate_that_is_none_ends_the_start(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In words, as what is wrong with any setting does."""
    certificate = tmp_path / "cert.pem"
    certificate.write_text("none")
    http = gateway(ssl_certfile=certificate)

    assert (
        build_daemon(address, gateway=http, during_load=lambda report: http.wait_until_settled()).run() == MISCONFIGURED
    )
    assert "the certificate and its key cannot be used" in caplog.text


def test_a_flag_of_http_without_http_is_a_mistake(address: str) -> None:
    """Whoever gives one means to protect or to change something."""
    command = [*ODRIVER, "serve", "--bind", address, "--api-key", "token-abc123"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)

    assert done.returncode == MISCONFIGURED and "--api-key is for HTTP, which is not served" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"trusted_proxies": "::1"}, "--trusted-proxies is for HTTP, which is not served: give --http"),
        ({"max_connections": 8}, "--max-connections is for HTTP"),
        ({"allowed_origins": ["*"]}, "--allowed-origins is for HTTP"),
        ({"tool_call_parser": "hermes"}, "--tool-call-parser is for HTTP"),
        ({"metrics_host": "::1"}, "--metrics-host is for metrics, which are not served: give --metrics-port"),
        (
            {"socket_access": "group", "bind": "tcp://127.0.0.1:7001"},
            "--socket-access group is for ipc:// sockets, and tcp://127.0.0.1:7001 is none",
        ),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused_by_name(flags: dict[str, Any], words: str) -> None:
    """In a file, which may be that of several daemons, it is no mistake."""
    _, daemon, http = configs(held(flags))

    with pytest.raises(ConfigurationError, match=re.escape(words)):
        _check_of_use(flags, daemon, http)
    _check_of_use({}, daemon, http)
    _check_of_use({**flags, "http": "8000"}, replace(daemon, metrics_port=1, bind=None), HttpConfig(http="8000"))


def test_a_port_is_a_number_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without quotes."""
    (tmp_path / "c.toml").write_text("http = 8123")
    monkeypatch.setenv("ODRIVER_CONFIG", str(tmp_path / "c.toml"))

    assert http_config(held({})).address == ("127.0.0.1", 8123)


def test_the_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``odriver config`` says that there is one, and where it comes from."""
    monkeypatch.setenv("ODRIVER_API_KEY", "token-abc123")

    assert main(["config", "--json"]) == 0

    shown = capsys.readouterr().out
    assert "token-abc123" not in shown and "ODRIVER_API_KEY" in shown
