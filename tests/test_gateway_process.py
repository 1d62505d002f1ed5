"""``odriver gateway`` as a process: its port, its signals, HTTPS."""

import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from gateways import CHAT, TEXT, chat, events
from test_cli import ENVIRONMENT, ODRIVER

from engine.exit_codes import MISCONFIGURED
from ipc.commands.cli import main


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its address; it has ended at the end."""
    command = [*ODRIVER, "gateway", "--port", "0", *arguments]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"https?://\S+", line)))
        try:
            yield process, url
        finally:
            process.kill()


def test_what_is_open_is_finished_before_it_ends(address: str, driver: FakeDriver) -> None:
    """After SIGTERM nothing new is taken, a stream comes to its end, and the exit code is 0."""
    with started("--connect", address) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        told: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: told.append(http.post(CHAT, json=chat("hold", stream=True))))
        asking.start()
        request = driver.take()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert any("nothing new is taken" in line for line in process.stderr)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=PATIENCE)
        driver.say(request, "the end", [1])
        driver.finish(request)
        asking.join()
        assert process.wait() == 0
    assert "the end" in str(events(told[0]))


def test_what_is_not_done_in_time_is_told_so_and_aborted(address: str, driver: FakeDriver) -> None:
    """A stream by an event; the exit code is 0 all the same."""
    saying = threading.Thread(target=lambda: driver.say(driver.take(), "so far", [1]))
    saying.start()
    with started("--connect", address, "--drain-timeout", "0.2") as (process, url):
        with httpx.stream("POST", url + CHAT, json=chat("hold", stream=True), timeout=PATIENCE) as answer:
            process.send_signal(signal.SIGTERM)
            told = events(answer)
        assert process.wait() == 0
        assert process.stderr is not None
        assert ": 200 in" in (log := process.stderr.read()) and ", broken off: the gateway ends" in log
    saying.join()
    assert told[-1]["error"]["message"] == "the gateway ends"
    assert driver.aborted.get(timeout=PATIENCE) == driver.submitted[0].request_id


def test_it_waits_for_a_daemon_as_long_as_it_is_told_to(address: str) -> None:
    """Then the request that was open ends with an error in words."""
    told_to = "--connect", address, "--resume-timeout", "0.2"
    with started(*told_to) as (process, url), ThreadPoolExecutor(1) as thread:
        with serving(address, driver := FakeDriver()):
            asking = thread.submit(httpx.post, url + TEXT, json={"prompt": "hold"}, timeout=PATIENCE)
            driver.take()
        answer = asking.result()
        process.terminate()
        assert process.stderr is not None
        assert "1 requests wait up to 0.2 s to be resumed" in process.stderr.read()
    assert answer.status_code == 502
    assert "within 0.2 s it could not be resumed" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("driver")
def test_api_keys_are_read_again_and_https_is_spoken(address: str, tmp_path: Path) -> None:
    """With a certificate; who is written into the file is known after SIGHUP."""
    certificate, key, api_keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys.toml"))
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(
        [
            *openssl,
            "-keyout",
            key,
            "-out",
            certificate,
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    api_keys.touch(mode=0o600)
    flags = ["--api-keys", str(api_keys), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    trusting = ssl.create_default_context(cafile=str(certificate))
    with (
        started("--connect", address, *flags) as (process, url),
        httpx.Client(base_url=url, verify=trusting, timeout=PATIENCE) as http,
    ):
        headers = {"Authorization": "Bearer sk-0123456789abcdef"}
        assert url.startswith("https:") and http.post(TEXT, json={"prompt": "x"}, headers=headers).status_code == 401
        api_keys.write_text('[alice]\napi_key = "sk-0123456789abcdef"\n')
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        assert any("1 API keys are known" in line for line in process.stderr)
        assert http.post(TEXT, json={"prompt": "x"}, headers=headers).status_code == 200


def test_a_port_that_is_taken_is_an_error_in_plain_words(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything else is begun, and with the exit code that `serve` has for it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gateway", "--connect", address, "--port", str(port)]) == MISCONFIGURED
    assert f"another program listens at 127.0.0.1, port {port}" in capsys.readouterr().err
