"""A model in a bucket: its small files are copied, its tensors read where they are, each device's part for it alone."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import build_checkpoint
from flax import nnx
from free_ports import free_port
from google.cloud import storage
from loading import FLOAT32, load
from tokenizer_files import build_byte_level, write_tokenizer

from engine.config import EngineConfig
from engine.devices.mesh import DeviceMesh
from engine.errors import ConfigurationError, DownloadFailed
from engine.hub.obtain import obtained
from engine.models.model_config import read_model_config
from engine.models.partition import split
from engine.models.weights.sources.bucket_source import BucketCheckpoint
from engine.models.weights.sources.checkpoint import open_checkpoint
from engine.models.weights.sources.opening import open_weights
from engine.models.weights.store import load_decoder

BUCKET = "gs://models"


@pytest.fixture(scope="module")
def bucket() -> Iterator[storage.Bucket]:
    """A bucket of an emulator, which is the storage of this process."""
    from eformer.paths import ePath
    from gcp_storage_emulator.server import create_server

    port = free_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        environment.setattr(ePath, "_gcs_client", None)
        server = create_server("127.0.0.1", port, in_memory=True, default_bucket="models")
        server.start()
        try:
            yield storage.Client().bucket("models")
        finally:
            server.stop()


def upload(bucket: storage.Bucket, directory: Path, name: str) -> str:
    """The URL of a copy of a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            bucket.blob(f"{name}/{path.relative_to(directory)}").upload_from_filename(str(path))
    return f"{BUCKET}/{name}"


def build(directory: Path, **how: Any) -> Path:
    """A model with its tokenizer."""
    build_checkpoint(directory, "qwen3", **how)
    return write_tokenizer(directory, build_byte_level())


def obtain(url: str, **settings: Any) -> EngineConfig:
    """What a start does first."""
    return obtained(EngineConfig(model=url, **settings), lambda progress: None)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_model_in_a_bucket_is_the_model_in_a_directory(
    bucket: storage.Bucket, tmp_path: Path, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; no tensor's bytes come twice for one device, and no weights lie on a disk."""
    directory = build(tmp_path / "model", files=2, stored="bfloat16")
    config = obtain(upload(bucket, directory, "team/qwen3"))
    came: list[int] = []
    rows = BucketCheckpoint._rows
    monkeypatch.setattr(
        BucketCheckpoint, "_rows", lambda self, *where: (read := rows(self, *where), came.append(read.nbytes))[0]
    )

    with open_weights(config.directory, config.weights_url) as source:
        partition = split(read_model_config(config.directory), devices)
        mesh = DeviceMesh(tuple(jax.local_devices()[:devices]))
        decoder = load_decoder(source, partition, FLOAT32, mesh=mesh, progress=lambda done, total: None)

    theirs = load(directory, devices=devices)
    for ours, other in zip(jax.tree.leaves(nnx.state(decoder)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(other))
    stored = sum(source.info(name).nbytes for name in source.names)
    assert sum(came) == stored if devices == 1 else sum(came) < 1.2 * stored  # norms are on every device
    assert config.served_model_name == ("qwen3",) and config.weights_url == f"{BUCKET}/team/qwen3"
    assert not list(config.directory.glob("*.safetensors"))


def test_a_changed_model_is_read_anew(bucket: storage.Bucket, tmp_path: Path) -> None:
    """Files that are there no more are none of it."""
    directory = build(tmp_path / "model", files=2)
    url = upload(bucket, directory, "changing")
    obtain(url)
    bucket.blob("changing/model.safetensors.index.json").delete()
    bucket.blob("changing/config.json").upload_from_string(json.dumps({"model_type": "llama", "vocab_size": 7}))

    directory = obtain(url).directory

    assert json.loads((directory / "config.json").read_text())["vocab_size"] == 7
    assert "model.safetensors.index.json" not in {path.name for path in directory.iterdir()}


def test_templates_in_a_folder_of_their_own_are_copied_too(bucket: storage.Bucket, tmp_path: Path) -> None:
    """As transformers writes those that have a name; one that is there no more is none of the model's."""
    directory, templates = build(tmp_path / "model"), ("rag.jinja", "tool_use.jinja")
    (directory / "additional_chat_templates").mkdir()
    for name in templates:
        (directory / "additional_chat_templates" / name).write_text(name)
    url = upload(bucket, directory, "templates")

    first = sorted(path.name for path in obtain(url).directory.glob("*/*"))
    bucket.blob("templates/additional_chat_templates/rag.jinja").delete()
    second = sorted(path.name for path in obtain(url).directory.glob("*/*"))

    assert (first, second) == ([*templates], ["tool_use.jinja"])


def test_two_may_copy_one_model_at_once(
    bucket: storage.Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes away no file that the other has not finished."""
    url = upload(bucket, build(tmp_path / "model"), "shared")
    replace = Path.replace

    def replaced(path: Path, target: Path) -> Path:
        with pytest.MonkeyPatch.context() as elsewhere:
            elsewhere.setattr(Path, "replace", replace)
            elsewhere.setattr(os, "getpid", lambda: 1)
            obtain(url)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replaced)

    directory = obtain(url).directory

    names = [path.name for path in directory.iterdir()]
    assert sorted(names) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_single_file_in_a_bucket_goes_before_an_index(bucket: storage.Bucket, tmp_path: Path) -> None:
    """As in a directory; the index may be of files that are there no more."""
    directory = build(tmp_path / "model")
    stale = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(stale))
    config = obtain(upload(bucket, directory, "stale"))

    with open_weights(config.directory, config.weights_url) as source:
        assert set(source.names) == set(open_checkpoint(directory).names)


def test_what_is_wrong_with_a_bucket_is_said(bucket: storage.Bucket, tmp_path: Path) -> None:
    """No such bucket or directory, no weights in it, and a file that is none."""
    with pytest.raises(ConfigurationError, match=r"gs://nowhere/model is not there"):
        obtain("gs://nowhere/model")
    with pytest.raises(ConfigurationError, match=r"gs://models/empty has no config\.json"):
        obtain(f"{BUCKET}/empty")
    with pytest.raises(ConfigurationError, match="is no directory in a bucket"):
        obtain(f"{BUCKET}/../../etc")
    directory = build(tmp_path / "model")
    url = upload(bucket, directory, "broken")
    bucket.blob("broken/model.safetensors").upload_from_string(b"x" * 64)
    config = obtain(url)
    with (
        pytest.raises(ConfigurationError, match=r"broken/model\.safetensors is no safetensors file"),
        open_weights(config.directory, config.weights_url),
    ):
        pass
    bucket.blob("broken/model.safetensors").upload_from_string((directory / "model.safetensors").read_bytes()[:-64])
    with (
        pytest.raises(DownloadFailed, match="ends after"),
        open_weights(config.directory, config.weights_url) as source,
    ):
        for name in source.names:
            source.read(name, (slice(None),) * len(source.info(name).shape))


def test_without_credentials_it_is_said_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's own tool, or a file."""
    from eformer.paths import ePath
    from google.auth.exceptions import DefaultCredentialsError

    monkeypatch.setattr(ePath, "_gcs_client", None)
    monkeypatch.setattr(storage, "Client", lambda: (_ for _ in ()).throw(DefaultCredentialsError("none")))

    with pytest.raises(ConfigurationError, match="gcloud auth application-default login"):
        obtain(f"{BUCKET}/model")


def test_a_quantised_model_is_read_from_a_bucket(
    bucket: storage.Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices get what they get from a directory, and hardly more bytes come than are stored."""
    shutil.copytree(Path(__file__).parent / "goldens" / "quantised" / "fp8_tensor", tmp_path / "model")
    config = obtain(upload(bucket, write_tokenizer(tmp_path / "model", build_byte_level()), "team/fp8"))
    came: list[int] = []
    rows = BucketCheckpoint._rows
    monkeypatch.setattr(
        BucketCheckpoint, "_rows", lambda self, *where: (read := rows(self, *where), came.append(read.nbytes))[0]
    )
    partition, mesh = split(read_model_config(config.directory), 2), DeviceMesh(tuple(jax.local_devices()[:2]))

    with open_weights(config.directory, config.weights_url) as source:
        ours = load_decoder(source, partition, FLOAT32, mesh=mesh, progress=lambda done, total: None)
        stored = sum(source.info(name).nbytes for name in source.names)

    theirs = load(tmp_path / "model", devices=2)
    for leaf, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))
    assert sum(came) < 1.2 * stored
