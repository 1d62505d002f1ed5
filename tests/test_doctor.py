"""What ``odriver doctor`` finds on machines of all kinds."""

import getpass
import importlib.metadata
import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from adapter_files import AdapterKind, write_adapter
from checkpoints import build_checkpoint
from fake_driver import PATIENCE, FakeDriver, build_server, serving

from caching import cpu_kernels
from engine.models.weights.sources.safetensors_header import DTYPES
from engine.models.weights.sources.tensor_source import TensorInfo
from ipc import main
from ipc.commands import cli
from ipc.commands.diagnosis import address_checks, doctor, model_checks
from ipc.commands.diagnosis.findings import Finding
from ipc.service import accelerators, device_choice
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.wire import keys


@contextmanager
def holding(path: Path, call: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """Another process that has opened a file, and done this with it."""
    code = f"import fcntl, sys\nfile = open(sys.argv[1], 'r+b')\n{call}\nprint('ready', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


LOCK = "fcntl.lockf(file, fcntl.LOCK_EX)"


def test_accelerators_are_found_with_those_who_hold_them(tmp_path: Path) -> None:
    """TPUs of both drivers and GPUs; of the processes those that have one open, but not this one."""
    dev, group = tmp_path / "dev", tmp_path / "sys/kernel/iommu_groups/0/devices/0000:00:05.0"
    for directory in (dev / "vfio", group):
        directory.mkdir(parents=True)
    (group / "vendor").write_text("0x1ae0\n")
    for name in ("accel0", "accel1", "vfio/0", "vfio/vfio", "nvidia0", "nvidiactl", "null"):
        (dev / name).touch()

    found = accelerators.devices(tmp_path)

    assert [str(path.relative_to(dev)) for path in found] == ["accel0", "accel1", "vfio/0", "nvidia0"]
    with holding(dev / "accel1") as process, holding(dev / "null"), (dev / "accel0").open():
        (holder,) = accelerators.holders(found)
    assert (holder.pid, holder.user) == (process.pid, getpass.getuser())
    assert holder.command.startswith(sys.executable)


def test_an_accelerator_has_to_be_free_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it open is named with the command that ends it; a TPU needs libtpu; none at all is fine."""
    tpu, gpu, lock = tmp_path / "accel0", tmp_path / "nvidia0", tmp_path / "lockfile"
    tpu.touch()
    gpu.touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")

    assert doctor.accelerator([]).state == "good"
    assert doctor.accelerator([tpu], lock) == Finding("accelerator", "good", f"{tpu}, free")
    with holding(tpu) as process:
        _, state, found, advice = doctor.accelerator([tpu], lock)
        assert (state, advice) == ("bad", f"kill {process.pid}")
        assert f"in use by process {process.pid} of {getpass.getuser()} since 2" in found and sys.executable in found
    with holding(gpu) as process:
        _, state, found, advice = doctor.accelerator([gpu])
        assert (state, advice) == ("warning", f"if it takes memory: kill {process.pid}")
        assert f"{gpu} is shared with process {process.pid} of " in found
    monkeypatch.setattr(importlib.metadata, "version", lambda name: importlib.metadata.distribution("no-such").version)
    assert doctor.accelerator([tpu], lock)[1:] == ("bad", f"{tpu}, but no libtpu", 'pip install "odriver[tpu]"')
    assert doctor.accelerator([gpu]).state == "warning"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.accelerator([tpu], lock).found == f"{tpu} may not be opened"


def test_who_has_locked_the_tpu_is_named(tmp_path: Path) -> None:
    """With what libtpu uses, lockf; a lock that is only there, as libtpu leaves it, is in nobody's way."""
    lock = tmp_path / "lockfile"
    assert accelerators.tpu_obstacle([], lock) is None
    lock.touch()
    assert accelerators.tpu_obstacle([], lock) is None
    with holding(lock, "fcntl.flock(file, fcntl.LOCK_EX)"):
        assert accelerators.tpu_obstacle([], lock) is None

    with holding(lock, LOCK) as process:
        obstacle = accelerators.tpu_obstacle([], lock)

    assert obstacle is not None and obstacle.passes and obstacle.advice == f"kill {process.pid}"
    assert obstacle.found.startswith(f"the TPU is in use by process {process.pid} of {getpass.getuser()} since")


def test_a_lock_of_somebody_who_is_gone_has_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux lets nobody open another user's file in /tmp as libtpu does; a restart would not help."""
    lock = tmp_path / "lockfile"
    lock.touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    found = f"the TPU is free, but {lock} is of {getpass.getuser()}, who left it"
    assert accelerators.tpu_obstacle([], lock) == (found, f"sudo rm {lock}", False)


def test_what_cannot_be_found_out_is_quoted(tmp_path: Path) -> None:
    """A process of another user that has the device is not to be seen: JAX's words, and how root can see it."""
    obstacle = accelerators.refusal(
        "NOT_FOUND: no device", [Path("/dev/vfio/0"), Path("/dev/nvidia0")], tmp_path / "no"
    )

    assert obstacle.passes and "NOT_FOUND: no device" in obstacle.found
    assert obstacle.advice.startswith(f"sudo lsof -w {tmp_path / 'no'} /dev/vfio/0, which")


def test_versions_are_held_against_what_we_ask_for() -> None:
    """What is missing or out of range is named; extras are not asked for."""
    numpy = importlib.metadata.version("numpy")

    assert doctor.versions(["numpy >=1", 'no-such; extra == "tpu"']).state == "good"
    assert doctor.versions(["numpy <1", "no-such >=2"])[1:3] == ("bad", f"numpy is {numpy}, not <1; no-such is missing")


def test_memory_and_files_may_be_tight() -> None:
    """Weights that don't fit keep a CPU from serving; an accelerator has its own memory."""
    assert model_checks.memory(3, 10, on_cpu=True).state == "good"
    assert model_checks.memory(8, 10, on_cpu=True).state == "warning"
    assert model_checks.memory(11, 10, on_cpu=True).state == "bad"
    assert model_checks.memory(11, 10, on_cpu=False).state == "good"
    assert doctor.open_files(256, 256)[1:] == ("warning", "256 at most", "ulimit -Hn 1024, or more")
    raised = "2048 at most: a start raises the limit of this shell, which is 256"
    assert doctor.open_files(256, 2048)[1:] == ("good", raised, "")
    assert doctor.open_files(-1, -1)[1:] == ("good", "any number", "")


def test_an_address_may_be_ours_or_taken_by_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of ours is no obstacle to having one; a program that says nothing is."""
    monkeypatch.setattr(address_checks, "PATIENCE", PATIENCE)
    address = f"ipc://{tmp_path}/o.sock"
    assert address_checks.listener(address).state == "good"
    with serving(address, FakeDriver()):
        assert address_checks.listener(address)[1:3] == ("warning", f"a daemon serves parrot at {address}")

    monkeypatch.setattr(address_checks, "PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        assert address_checks.listener(f"tcp://127.0.0.1:{port}").state == "bad"
        assert address_checks.listener(f"tcp://127.0.0.1:{port}", asks_for_keys=True).state == "warning"
        assert address_checks.port("HTTP port", "127.0.0.1", port, runs=False).state == "bad"
        assert address_checks.port("HTTP port", "127.0.0.1", port, runs=True).state == "warning"
        assert address_checks.port("HTTP port", "127.0.0.1", port, runs=False, or_any=True).state == "warning"


def test_a_daemon_that_starts_is_one_and_a_socket_may_be_closed_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a program of somebody else's."""
    monkeypatch.setattr(address_checks, "PATIENCE", 0.5)
    address = f"ipc://{tmp_path}/o.sock"
    server = build_server(address, print)
    server.start()
    try:
        _, state, found, _ = address_checks.listener(address)
        assert state == "warning" and found.startswith(f"the daemon at {address} is starting")
        monkeypatch.setattr(address_checks, "is_forbidden", lambda address: True)
        assert address_checks.listener(address)[1:3] == ("bad", f"{address} is another user's")
    finally:
        server.stop()


def test_all_that_a_daemon_listens_at_and_asks_for_is_looked_at(tmp_path: Path) -> None:
    """A port that is taken is bad where no daemon runs here; so are a certificate and keys that cannot be used."""
    (tmp_path / "cert.pem").write_text("no certificate")
    (tmp_path / "keys.toml").write_text("[alice]\n")
    (tmp_path / "keys.toml").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        http = HttpConfig(
            http=f"{stranger.getsockname()[1]}", ssl_certfile=tmp_path / "cert.pem", api_keys=tmp_path / "keys.toml"
        )
        daemon = DaemonConfig(bind=f"ipc://{tmp_path}/o.sock", metrics_host="::1", metrics_port=0)

        found = {finding.check: finding for finding in address_checks.examine(daemon, http)}

    assert {check: finding.state for check, finding in found.items()} == {
        "address": "good", "metrics port": "good", "HTTP port": "bad", "certificate": "bad", "API keys": "bad"
    }  # fmt: skip
    assert found["metrics port"].found == "::1, any port"
    unknown = address_checks.port("metrics port", "no.such.host.invalid", 1, runs=False)
    assert unknown.state == "bad" and "Unknown error" not in unknown.found


def test_a_device_that_is_named_is_the_one_that_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nobody asks who has the TPU; one that is not there is bad."""
    monkeypatch.delenv(device_choice.VARIABLE, raising=False)
    monkeypatch.setattr(device_choice, "sees_gpus", lambda: False)
    monkeypatch.setattr(device_choice, "sees_tpus", lambda: True)

    assert doctor.chosen("auto", tmp_path) is None
    assert doctor.chosen("cpu", tmp_path) == Finding("accelerator", "good", "not asked for: the CPU will serve")
    for device, said in (("tpu", "there is no TPU"), ("gpu", "no plugin")):
        found = doctor.chosen(device, tmp_path)
        assert found is not None and found.state == "bad" and said in found.found
    assert device_choice.is_cpu("auto", tmp_path) and device_choice.is_cpu("cpu") and not device_choice.is_cpu("tpu")
    monkeypatch.setenv(device_choice.VARIABLE, "cpu")
    assert doctor.chosen("auto", tmp_path) is not None and device_choice.is_cpu("auto")


@pytest.mark.parametrize(
    ("dtype", "quantization", "matrix", "scale"),
    [("auto", None, 16, 8), ("bfloat16", None, 8, 4), ("auto", "int8", 4, 8), ("bfloat16", "int4", 2, 4)],
)
def test_weights_are_counted_as_they_are_served(dtype: str, quantization: str | None, matrix: int, scale: int) -> None:
    """Of bfloat16 on the disk, float32 on a CPU unless it is told otherwise; what is published in 8 bits stays."""
    tensors = [TensorInfo((2, 2), DTYPES["BF16"]), TensorInfo((2,), DTYPES["BF16"]), TensorInfo((2, 2), DTYPES["I8"])]

    assert [model_checks.served_bytes(one, dtype, quantization) for one in tensors] == [matrix, scale, 4]


def test_where_keys_are_asked_for_somebody_should_have_one(tmp_path: Path) -> None:
    """None at all is said, and so is a file that is no key."""
    assert address_checks.authorized(tmp_path).state == "warning"
    keys.new(tmp_path, "alice", tmp_path / "alice.key")
    assert address_checks.authorized(tmp_path)[1:3] == ("good", f"1 in {tmp_path}")
    (tmp_path / "clients" / "bob.toml").write_text("public = 3")
    assert address_checks.authorized(tmp_path).state == "bad"


def test_the_exit_code_says_whether_a_start_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do, as a table or as JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(accelerators, "devices", list)
    bind = ["--bind", f"ipc://{tmp_path}/o.sock"]

    assert cli.main(["doctor", *bind, "--json"]) == 0
    found = {one["check"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert found["model"] == found["cache"] == found["address"] == found["settings"] == "good"

    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(cpu_kernels, "SHIPPED", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["doctor", *bind, str(tmp_path / "no-model")]) == 1
    printed = capsys.readouterr().out
    for words in ("cannot write in", "no-such-compiler", "not a", "directory"):
        assert words in printed
    assert cli.main(["doctor", "--page-size", "0"]) == 1
    assert "page_size must be" in capsys.readouterr().out


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of a container, that is a number alone: it is no reason not to start, and what to set is said."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    monkeypatch.setattr(main, "NO_HOME", "/proc/none")  # where root cannot write either
    monkeypatch.setattr(sys, "argv", ["odriver", "doctor", "--json"])

    main.main()

    cache = next(row for row in json.loads(capsys.readouterr().out) if row["check"] == "cache")
    assert cache["found"].startswith("cannot write in /proc/none/.cache/odriver")
    assert "XDG_CACHE_HOME" in cache["advice"]


def test_a_model_that_a_start_would_refuse_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For its weights, and as well without a tokenizer, or with values of generation_config.json that no request may
    have."""
    monkeypatch.setattr(accelerators, "devices", list)
    model = build_checkpoint(tmp_path / "model")
    command = ["doctor", "--bind", f"ipc://{tmp_path}/o.sock", str(model)]

    assert cli.main([*command, "--json"]) == 1
    assert "has no tokenizer.json" in capsys.readouterr().out
    assert cli.main([*command, "--tokenizer", "demo"]) == 0
    (model / "generation_config.json").write_text('{"temperature": -1}')
    assert cli.main([*command, "--tokenizer", "demo", "--json"]) == 1
    assert "temperature must be" in capsys.readouterr().out
    assert cli.main([*command, "--tokenizer", "demo", "--generation-config", "none"]) == 0


def test_what_a_start_would_refuse_beside_the_model_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft model and adapters have rows of their own, with the words of a start; what the network has is not asked
    for."""
    monkeypatch.setattr(accelerators, "devices", list)
    other = build_checkpoint(tmp_path / "other")
    fitting = write_adapter(tmp_path / "fitting", "llama2", AdapterKind(r"self_attn\.q_proj", 4))
    (tmp_path / "empty").mkdir()

    def drafts(model: str) -> list[str]:
        return [
            "--speculative-config",
            json.dumps({"method": "draft_model", "model": model, "num_speculative_tokens": 2}),
        ]

    def row(check: str, *flags: str) -> tuple[str, str]:
        cli.main(["doctor", "--bind", f"ipc://{tmp_path}/o.sock", "--json", *flags])
        (found,) = [one for one in json.loads(capsys.readouterr().out) if one["check"] == check]
        return found["state"], found["found"]

    known = [str(other), "--tokenizer", "some/repository"]
    lora = ["--enable-lora", "--lora-modules"]
    for check, flags, state, words in (
        ("model", ["some/repository"], "good", "asks the network"),
        ("model", ["some/repository", "--tokenizer", str(tmp_path / "empty")], "bad", "has no tokenizer.json"),
        ("draft model", drafts("demo_draft"), "good", "of weights"),
        ("draft model", drafts("some/repository"), "good", "asks the network"),
        ("draft model", drafts(str(other)), "bad", "choose a draft model of the same vocabulary"),
        ("draft model", ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'], "bad", "mtp"),
        ("draft model", drafts(str(tmp_path / "empty")), "bad", "speculative_config: model: "),
        ("draft model", [*drafts("demo_draft"), "some/repository"], "good", "is not known"),
        ("adapters", [*lora, f"mine={tmp_path / 'empty'}"], "bad", "lora_modules: mine: "),
        ("adapters", [*lora, f"demo={tmp_path / 'empty'}"], "bad", "is the model itself"),
        ("adapters", [*known, *lora, f"mine={fitting}"], "good", "mine"),
        ("adapters", [*known, "--max-lora-rank", "2", *lora, f"mine={fitting}"], "bad", "raise max_lora_rank"),
        ("adapters", [*known, "--lora-target-modules", "o_proj", *lora, f"mine={fitting}"], "bad", "no room for"),
        ("adapters", [*known, "--lora-target-modules", "no_proj", *lora, f"mine={fitting}"], "bad", "no module of"),
        ("adapters", [*lora, f"mine={fitting}"], "bad", "q_proj.lora_A.weight is [4, 48] and should be [4, "),
        ("adapters", [str(tmp_path / "nowhere"), *lora, f"mine={fitting}"], "good", "mine"),
        ("adapters", [*lora, "mine=gs://bucket/mine"], "good", "mine"),
        ("adapters", [str(tmp_path / "nowhere"), *lora, "mine=gs://bucket/mine"], "good", "mine"),
        ("adapters", ["--enable-lora", "--adapter-root", str(tmp_path / "nowhere")], "bad", "there is no directory"),
        ("adapters", ["--enable-lora", "--adapter-root", str(tmp_path)], "good", "none at the start"),
    ):
        found = row(check, *flags)
        assert found[0] == state and words in found[1], (flags, found)
