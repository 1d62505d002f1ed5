"""scripts/bench --vs: servers of others, which are asked over HTTP."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from checkpoints import build_checkpoint

from engine.errors import ConfigurationError
from engine.models.model_config import read_model_config
from scripts.benchmarks.clients.workload import Workload
from scripts.benchmarks.figures.figure import MeasurementFailed
from scripts.benchmarks.peers.gguf_file import interleaved, write_gguf
from scripts.benchmarks.peers.http_peers import PeerFailed, vllm
from scripts.benchmarks.peers.llama_lookup import LlamaLookup

pytestmark = pytest.mark.thorough

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Peer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        pieces = [{"choices": [{"text": str(token)}]} for token in asked["prompt"]]
        usage = {"completion_tokens": asked["max_tokens"]}
        for piece in [*pieces, {"choices": [], "usage": usage}]:
            event = b"data: " + json.dumps(piece, separators=(",", ":")).encode() + b"\\n\\n"
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
        self.wfile.write(b"0\\r\\n\\r\\n")

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Peer).serve_forever()
"""


def program(directory: Path, text: str) -> str:
    """A command that is this Python program."""
    path = directory / "peer"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o700)
    return str(path)


def test_a_server_is_asked_for_what_we_are(tmp_path: Path) -> None:
    """Each request's tokens are those of its usage, at the times of its pieces."""
    with vllm(program(tmp_path, SERVER), tmp_path) as peer:
        first, second = peer.run(Workload([[5, 6], [7, 8, 9]], max_tokens=3))

    assert peer.name == "vLLM"
    assert (first.tokens, second.tokens, first.error, second.error) == (3, 3, None, None)
    assert (len(first.arrivals), len(second.arrivals)) == (2, 3)


def test_servers_that_are_measured_together_answer_for_themselves(tmp_path: Path) -> None:
    """Neither is taken for the other, whichever is ready first; each ends with the measurement."""
    chatty = SERVER.replace('asked["max_tokens"]', '2 * asked["max_tokens"]')
    paths = [tmp_path / name for name in ("plain", "chatty")]
    for path, text in zip(paths, (SERVER, chatty), strict=True):
        path.mkdir()
        program(path, text)

    with vllm(str(paths[0] / "peer"), tmp_path) as first, vllm(str(paths[1] / "peer"), tmp_path) as second:
        tokens = [peer.run(Workload([[5]], max_tokens=3))[0].tokens for peer in (first, second, first)]
        servers = [child for child in psutil.Process().children() if "peer" in " ".join(child.cmdline())]

    assert tokens == [3, 6, 3]
    assert len(servers) == 2 and not any(server.is_running() for server in servers)


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    """It does not wait for one that has ended."""
    with (
        pytest.raises(PeerFailed, match=r"exit code 3 before it was ready:\nno such device"),
        vllm(program(tmp_path, "import sys; print('no such device', flush=True); sys.exit(3)"), tmp_path),
    ):
        pass


def test_rotated_pairs_are_neighbours() -> None:
    """A head's first and second halves take turns."""
    kernel = np.arange(8)[:, None] * np.ones((1, 2), int)

    assert interleaved(kernel, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_all_of_a_checkpoint_is_written_for_llama_cpp(tmp_path: Path) -> None:
    """Every tensor, by llama.cpp's name, in float32; another family is refused by name."""
    gguf: Any = pytest.importorskip("gguf")
    directory = build_checkpoint(tmp_path / "llama", "llama2")

    write_gguf(directory, tmp_path / "model.gguf")

    read = gguf.GGUFReader(tmp_path / "model.gguf")
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} < {tensor.name for tensor in read.tensors}
    assert len(read.tensors) == 9 * len(read_model_config(directory).blocks) + 3
    assert {tensor.tensor_type.name for tensor in read.tensors} == {"F32"}
    with pytest.raises(ConfigurationError, match="is none"):
        write_gguf(build_checkpoint(tmp_path / "qwen", "qwen2"), tmp_path / "other.gguf")


LOOKUP = """
import sys
prompt = open(sys.argv[sys.argv.index("-f") + 1]).read()
assert sys.argv[sys.argv.index("--spec-draft-n-max") + 1] == "7"
print(prompt + "<8><9>")
if "<1>" not in prompt:
    print("decoded    2 tokens in    0.050 seconds, speed:   40.000 t/s", file=sys.stderr)
"""


def test_a_lookups_answer_and_rate_are_what_it_prints(tmp_path: Path) -> None:
    """The prompt is before the answer; a program that doesn't tell its rate has failed."""
    lookup = LlamaLookup(program(tmp_path, LOOKUP), tmp_path / "model.gguf")

    decoded = lookup.decode([5, 6], max_tokens=2, drafts=7)

    assert (decoded.token_ids, decoded.rate) == ([8, 9], 40)
    with pytest.raises(MeasurementFailed, match="exit code 0"):
        lookup.decode([1], max_tokens=2, drafts=7)
