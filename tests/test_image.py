"""The image's check of health."""

import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fake_driver import PATIENCE

DOCKERFILE = Path(__file__).parent.parent / "scripts" / "Dockerfile"


class Health(BaseHTTPRequestHandler):
    """Answers with the status that the class has."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for some name, and its key, in one file."""
    directory = tmp_path_factory.mktemp("certificate")
    of_curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", *of_curve, "-nodes", "-subj", "/CN=example.org"]
    subprocess.run(
        [*command, "-keyout", directory / "key", "-out", directory / "cert"], check=True, capture_output=True
    )
    both = directory / "both.pem"
    both.write_text((directory / "key").read_text() + (directory / "cert").read_text())
    return both


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_the_image_is_healthy_as_its_gateway_is(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    """Over HTTP or HTTPS."""
    text = DOCKERFILE.read_text().replace("\\\n", "")
    found = re.search(r"^HEALTHCHECK .*? CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        if is_encrypted:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        _, *arguments = json.loads(found[1].replace(":8000", f":{server.server_port}"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for status, is_healthy in ((200, True), (503, False)):
                monkeypatch.setattr(Health, "status", status)
                done = subprocess.run([sys.executable, *arguments], capture_output=True, timeout=PATIENCE)
                assert (done.returncode == 0) is is_healthy, done.stderr
        finally:
            server.shutdown()
            thread.join()
