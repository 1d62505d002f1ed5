"""Adapters on several hosts: process 0 reads them, and brings them to the others while steps run."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adapter_files import ADAPTERS, write_adapter
from checkpoints import build_checkpoint
from free_ports import free_port
from test_several_hosts import PATIENCE, Process, made, tokens
from test_weights_on_hosts import Others
from tokenizer_files import build_byte_fallback, write_tokenizer

from engine.adapters.adapter import Adapter
from engine.errors import HostsError
from engine.hosts import remote_weights
from ipc.client import Client
from ipc.control_client import ControlClient

ARRAYS = (np.arange(5000, dtype=np.float32).reshape(50, 100), np.zeros((0, 3), ml_dtypes.bfloat16), np.float32(2.0))


def test_each_process_gets_all_arrays_beside_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, whatever their sizes; no command says any of it, so no step waits for it."""
    monkeypatch.setattr(remote_weights, "PIECE_BYTES", 999)
    others = Others(2)
    arrays = tuple(np.asarray(array) for array in (*ARRAYS, ARRAYS[0].astype(ml_dtypes.bfloat16)))

    others.leader.send_adapter(Adapter(7, "here", 8, arrays))

    for weights, heard in zip(others.weights, others.commands, strict=True):
        [(uid, received)] = weights.adapters.items()
        assert uid == 7 and not heard.poll()
        for ours, theirs in zip(arrays, received, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    others.close()
    with pytest.raises(HostsError, match="has gone"):
        others.leader.send_adapter(Adapter(8, "here", 8, arrays))


def said(address: str) -> dict[str, list[int]]:
    """The tokens of each model that the daemon has, and of no adapter."""
    with Client(address, timeout=PATIENCE) as client:
        names = ["", *(row["name"] for row in client.adapters())]
        streams = [
            client.generate("the fox", max_tokens=8, ignore_eos=True, temperature=0, model=name) for name in names
        ]
        return {name: tokens(list(stream)) for name, stream in zip(names, streams, strict=True)}


@pytest.mark.thorough
def test_two_processes_serve_adapters_that_are_loaded_meanwhile(tmp_path: Path) -> None:
    """As one process with two devices does, those of the start and others; a stream goes on beside them."""
    tokenizer = build_byte_fallback()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "num_hidden_layers": 1, "head_dim": 16}
    write_tokenizer(build_checkpoint(tmp_path / "model", "llama2", **sizes), tokenizer)
    kinds = list(ADAPTERS["llama2"].values())[:2]
    for name, kind in zip(("first", "second"), kinds, strict=True):
        write_adapter(tmp_path / "adapters" / name, "llama2", kind, **sizes)
    flags = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "16", "--adapter-root", str(tmp_path / "adapters")]
    flags += ["--lora-modules", "first=first"]
    one = Process(made(tmp_path / "one"), *flags, "--tensor-parallel-size", "2", devices=2)
    try:
        with ControlClient(one.address, timeout=PATIENCE) as control:
            control.load_adapter("second")
        alone = said(one.address)
    finally:
        one.end()
    flags += ["--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    directory = made(tmp_path / "two")
    two = [Process(directory, *flags, "--process-id", str(number)) for number in range(2)]
    try:
        with (
            Client(two[0].address, timeout=PATIENCE) as client,
            ControlClient(two[0].address, timeout=PATIENCE) as control,
        ):
            with client.generate("the fox", max_tokens=38, ignore_eos=True, temperature=0) as pieces:
                found = [next(pieces)]
                control.load_adapter("second")
                found += pieces
            assert tokens(found)[:8] == alone[""]
            assert said(two[0].address) == alone
            control.unload_adapter("second")
        assert len({tuple(given) for given in alone.values()}) == 3
    finally:
        for process in two:
            process.end()
    assert "Traceback" not in two[0].log() + two[1].log()
