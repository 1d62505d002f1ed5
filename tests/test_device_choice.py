"""What a daemon serves on, by ``--device`` and by what the machine has: each machine here is a tree of files."""

import logging
import os
import subprocess
from pathlib import Path

import pytest

from engine.errors import ConfigurationError
from ipc.service import accelerators, device_choice
from ipc.service.configuration import DaemonConfig
from ipc.service.device_choice import VARIABLE, choose_device

ENVIRONMENT = Path(__file__).parent.parent / "scripts" / "environment.sh"
GOOGLE, OTHER = "0x1ae0", "0x10de"


def build_machine(root: Path, *devices: str, vfio: str | None = None) -> Path:
    """A machine with these devices, and perhaps one that VFIO passes on, of this vendor."""
    for device in devices:
        (root / "dev" / device).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / device).touch()
    if vfio is not None:
        group = root / "sys/kernel/iommu_groups/3/devices/0000:00:05.0"
        group.mkdir(parents=True)
        (group / "vendor").write_text(f"{vfio}\n")
        (root / "dev/vfio").mkdir(parents=True)
        for name in ("3", "vfio"):
            (root / "dev/vfio" / name).touch()
    return root


@pytest.fixture
def jax_with(monkeypatch: pytest.MonkeyPatch):
    """Sets what JAX has the support of."""
    monkeypatch.setenv(VARIABLE, "")

    def set_support(*, tpus: bool = False, gpus: bool = False) -> None:
        monkeypatch.setattr(device_choice, "sees_tpus", lambda: tpus)
        monkeypatch.setattr(device_choice, "sees_gpus", lambda: gpus)

    set_support()
    return set_support


@pytest.mark.parametrize(
    ("devices", "vfio", "found"),
    [
        (["accel0", "accel1"], None, ["accel0", "accel1"]),
        ([], GOOGLE, ["vfio/3"]),
        ([], OTHER, []),
        (["accel/accel0", "nvidia0", "null"], None, []),
        ([], None, []),
    ],
)
def test_daemon_and_installer_find_the_same_tpus(
    tmp_path: Path, devices: list[str], vfio: str | None, found: list[str]
) -> None:
    """Files of the TPU's driver, and of VFIO where the device is Google's; other accelerators are none."""
    root = build_machine(tmp_path, *devices, vfio=vfio)

    installer = subprocess.run(["bash", "-c", f'source "{ENVIRONMENT}"; has_tpu "{root}"'], check=False)

    assert [str(path.relative_to(root / "dev")) for path in accelerators.tpus(root)] == found
    assert installer.returncode == (0 if found else 1)


def test_a_machine_without_accelerators_serves_on_its_cpu(tmp_path: Path, jax_with) -> None:
    """So JAX does not even load a libtpu that happens to be installed."""
    jax_with(tpus=True)

    choose_device("auto", tmp_path)

    assert os.environ[VARIABLE] == "cpu"


def test_a_tpu_is_used_or_the_start_fails(tmp_path: Path, jax_with) -> None:
    """What is missing, how to get it and how to insist are said; --device cpu insists."""
    root = build_machine(tmp_path, "accel0")

    with pytest.raises(ConfigurationError, match=r'accel0\).*pip install "odriver\[tpu\]".*--device cpu'):
        choose_device("auto", root)
    assert not os.environ[VARIABLE]
    choose_device("cpu", root)
    assert os.environ[VARIABLE] == "cpu"
    os.environ[VARIABLE] = ""
    jax_with(tpus=True)
    choose_device("auto", root)
    assert os.environ[VARIABLE] == "tpu,cpu"


def test_a_gpu_that_jax_does_not_see_is_one_warning(tmp_path: Path, jax_with, caplog: pytest.LogCaptureFixture) -> None:
    """And the CPU serves; with a plugin JAX decides."""
    root = build_machine(tmp_path, "nvidia0", "nvidiactl")

    with caplog.at_level(logging.WARNING):
        choose_device("auto", root)

    assert os.environ[VARIABLE] == "cpu"
    [warning] = caplog.messages
    assert "nvidia0" in warning and 'pip install "jax[cuda]"' in warning
    os.environ[VARIABLE] = ""
    jax_with(gpus=True)
    choose_device("auto", root)
    assert not os.environ[VARIABLE]


@pytest.mark.parametrize(("device", "advice"), [("tpu", r"odriver\[tpu\]"), ("gpu", r"jax\[cuda\]")])
def test_a_device_that_is_named_has_to_be_supported(tmp_path: Path, jax_with, device: str, advice: str) -> None:
    """Nothing else is taken instead, be the device there or not."""
    with pytest.raises(ConfigurationError, match=advice):
        choose_device(device, tmp_path)

    jax_with(tpus=True, gpus=True)
    choose_device(device, tmp_path)
    assert os.environ[VARIABLE] == {"tpu": "tpu,cpu", "gpu": "cuda,cpu"}[device]


@pytest.mark.usefixtures("jax_with")
def test_the_variable_of_jax_holds_unless_a_device_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets it knows what they do, also on a TPU VM."""
    root = build_machine(tmp_path, "accel0")
    monkeypatch.setenv(VARIABLE, "rocm")

    choose_device("auto", root)
    assert os.environ[VARIABLE] == "rocm"
    choose_device("cpu", root)
    assert os.environ[VARIABLE] == "cpu"


def test_an_unknown_device_is_refused() -> None:
    """With the ones that there are."""
    with pytest.raises(ConfigurationError, match="device must be one of auto, tpu, gpu, cpu, not cuda"):
        DaemonConfig(device="cuda")
