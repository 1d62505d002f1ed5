"""A model by its name on the Hugging Face hub: what is downloaded, and what is said where that fails."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from checkpoints import build_checkpoint
from fake_hub import COMMIT, FakeHub, fake_hub
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from mtp_checkpoints import SPECULATION, build_predicting
from tokenizer_files import build_byte_level, write_tokenizer

from engine.config import EngineConfig
from engine.errors import ConfigurationError, DownloadFailed
from engine.hub import hugging_face
from engine.hub.names import DEMO_MODEL, Place, place_of, served_name
from engine.hub.obtain import obtained, small_files
from engine.hub.roots import Root
from engine.models.generation_config import chosen_generation_config
from engine.models.weights.sources.checkpoint import weight_files
from engine.progress import Progress
from ipc.client import Client
from ipc.commands.plan_command import _config_file
from ipc.service.http_config import HttpConfig
from scripts.processes import odriver

NAME = "acme/tiny-qwen3"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model, in two shards; the cache is empty, and there is no token."""
    constants = huggingface_hub.constants
    with fake_hub() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": 500,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.repositories[NAME] = build_checkpoint(tmp_path / "model", "qwen3", files=2)
        write_tokenizer(tmp_path / "model", build_byte_level())
        for name in ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors"):
            (tmp_path / "model" / name).write_text("neither data that is needed nor data at all")
        yield hub


def fetch(progress: list[Progress] | None = None, **settings: object) -> EngineConfig:
    """What a start does first."""
    return obtained(EngineConfig(**{"model": NAME, **settings}), [].append if progress is None else progress.append)


def test_a_name_is_downloaded_and_served_under_it(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that it takes and no others, with progress in bytes up to the last, which we show and nobody else.

    A second time nothing comes.
    """
    progress: list[Progress] = []

    config = fetch(progress)
    first = hub.names("GET")
    again = fetch()

    assert config.directory.name == COMMIT and config.served_model_name == (NAME,) == again.served_model_name
    shards = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in config.directory.iterdir()) == sorted(
        [*("config.json", "generation_config.json", "model.safetensors.index.json"), *TOKENIZER, *shards]
    )
    size = sum((hub.repositories[NAME] / name).stat().st_size for name in shards)
    assert progress[-1] == Progress("downloading the model", size, size, "bytes")
    assert hub.names("GET") == first
    assert capsys.readouterr() == ("", "")


def test_a_single_file_goes_before_an_index(hub: FakeHub, tmp_path: Path) -> None:
    """On the hub as in a directory: the shards beside it do not come."""
    single = build_checkpoint(tmp_path / "single", "qwen3") / "model.safetensors"
    shutil.copy(single, hub.repositories[NAME])

    directory = fetch().directory

    assert [name for name in hub.names("GET") if name.endswith(".safetensors")] == ["model.safetensors"]
    assert weight_files(directory) == [directory / "model.safetensors"]


def test_a_cut_connection_is_resumed(hub: FakeHub) -> None:
    """Where it was cut, and what has come is what the hub has; the progress is not more than all."""
    name = "model-00002-of-00002.safetensors"
    hub.broken[name] = 1000
    progress: list[Progress] = []

    directory = fetch(progress).directory

    assert (directory / name).read_bytes() == (hub.repositories[NAME] / name).read_bytes()
    assert [where for method, path, where in hub.asked if method == "GET" and path.endswith(name)] == [
        None,
        "bytes=1000-",
    ]
    assert progress[-1].done == progress[-1].total >= max(one.done for one in progress)


def test_a_connection_that_is_reset_is_tried_again(hub: FakeHub) -> None:
    """The file is begun anew then; the progress ends at all of it, all the same."""
    name = "model-00002-of-00002.safetensors"
    hub.broken[name], hub.resets = 1000, True
    progress: list[Progress] = []

    directory = fetch(progress).directory

    assert (directory / name).read_bytes() == (hub.repositories[NAME] / name).read_bytes()
    assert [where for method, path, where in hub.asked if method == "GET" and path.endswith(name)] == [None, None]
    assert progress[-1].done == progress[-1].total


def test_what_comes_through_xet_is_counted() -> None:
    """As huggingface_hub reports it: bytes of the network beside those of the file, which are what counts."""
    progress: list[Progress] = []
    steps = [(0, 30), (10, 60), (100, 80)]

    with XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=30, tqdm_class=hugging_face._counter(100, progress.append)
    ) as reporter:
        for file, network in steps:
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=100,
                    total_bytes_completed=file,
                    total_bytes_completion_rate=None,
                    total_transfer_bytes_completed=network,
                    total_transfer_bytes_completion_rate=None,
                )
            )

    assert [one.done for one in progress] == [0, 10, 100]


@pytest.mark.parametrize("small", [True, False])
def test_what_does_not_come_through_xet_may_come_another_time(
    hub: FakeHub, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf_xet has no other error than RuntimeError for a storage that refuses, or that a firewall hides: it is no fault
    of ours, and there is another way.
    """

    def refuse(**_: object) -> None:
        raise RuntimeError("Task error: CAS Client Error: Request middleware error")

    if not small:
        small_files(NAME)
    hub.xet = True
    monkeypatch.setattr(huggingface_hub.file_download, "xet_get", refuse)

    with pytest.raises(DownloadFailed, match=r"tiny-qwen3: it does not come through Xet.*CAS.* HF_HUB_DISABLE_XET=1"):
        fetch()


def test_a_config_alone_is_enough_for_a_plan(hub: FakeHub) -> None:
    """Nothing else is downloaded for one."""
    assert _config_file(NAME).is_file()
    assert hub.names("GET") == ["config.json"]


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_come(hub: FakeHub) -> None:
    """By its family, or by a key that no decoder has."""
    path = hub.repositories[NAME] / "config.json"
    config = json.loads(path.read_text())
    for key, value in {"model_type": "mamba", "quantization_config": {"quant_method": "gguf"}}.items():
        path.write_text(json.dumps({**config, key: value}))
        with pytest.raises(ConfigurationError, match=f"{key}.* is not (supported|read)"):
            fetch()
        shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE)

    assert not any(name.endswith(".safetensors") for name in hub.names("GET"))


def test_drafts_by_a_layer_that_it_has_not_are_refused_before_its_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    """By the config.json, and by the index where the layer was left out of the files."""
    with pytest.raises(ConfigurationError, match="this model has none"):
        fetch(speculative_config=SPECULATION)
    hub.repositories["acme/glm"] = build_predicting(tmp_path / "glm", "mtp of GLM")
    write_tokenizer(tmp_path / "glm", build_byte_level())
    whole = fetch(model="acme/glm", speculative_config=SPECULATION).directory
    config = json.loads((tmp_path / "glm" / "config.json").read_text())
    build_checkpoint(tmp_path / "cut", "glm4_moe", files=2, **config)
    write_tokenizer(tmp_path / "cut", build_byte_level())
    hub.repositories["acme/cut"] = tmp_path / "cut"
    with pytest.raises(ConfigurationError, match=r"its weights have no model\.layers\.2\.\*, that layer"):
        fetch(model="acme/cut", speculative_config=SPECULATION)
    assert [name for name in hub.names("GET") if name.endswith(".safetensors")] == ["model.safetensors"]
    hub.repositories["acme/both"] = shutil.copytree(tmp_path / "cut", tmp_path / "both")
    shutil.copy(whole / "model.safetensors", tmp_path / "both")  # which the index is not of

    both = fetch(model="acme/both", speculative_config=SPECULATION).directory

    assert weight_files(both) == [both / "model.safetensors"]


def test_what_else_is_wrong_is_said_before_its_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    """A directory without a generation config, a chat template that is not there, a cache that cannot be written."""
    with pytest.raises(ConfigurationError, match="generation_config must be auto, none, or a directory"):
        fetch(generation_config=str(tmp_path))
    with pytest.raises(ConfigurationError, match="there is no chat template"):
        fetch(chat_template=tmp_path / "none.jinja")
    with pytest.MonkeyPatch.context() as elsewhere:
        (tmp_path / "file").touch()
        elsewhere.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
        with pytest.raises(ConfigurationError, match=r"cannot write in .*file/hub: Not a directory: set HF_HOME"):
            fetch()
    assert not any(name.endswith(".safetensors") for name in hub.names("GET"))


def test_a_tokenizer_may_be_another_models(hub: FakeHub, tmp_path: Path) -> None:
    """By its name, with the config.json that tells its family; a model without one is refused
    before its weights come.
    """
    alone = hub.repositories["acme/alone"] = build_checkpoint(tmp_path / "alone", "qwen3")
    with pytest.raises(
        ConfigurationError, match=r"acme/alone has no tokenizer\.json, .* name a model that has one with --tok"
    ):
        fetch(model="acme/alone")
    assert not any(name.endswith(".safetensors") for name in hub.names("GET"))

    config = fetch(model="acme/alone", tokenizer=NAME)

    files = sorted(path.name for path in Path(config.tokenizer or "").iterdir())
    assert files == sorted(["config.json", *TOKENIZER])
    assert (config.directory / "model.safetensors").stat().st_size == (alone / "model.safetensors").stat().st_size


def test_weights_that_the_disk_cannot_hold_are_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers, before any of them comes."""
    monkeypatch.setattr(hugging_face, "disk_usage", lambda path: SimpleNamespace(free=1))

    with pytest.raises(ConfigurationError, match=r"the weights of acme/tiny-qwen3 are .* kB, and .* has 1 byte left"):
        fetch()

    assert not any(name.endswith(".safetensors") for name in hub.names("GET"))


@pytest.mark.parametrize(
    ("file", "reason"),
    [("pytorch_model.bin", "PyTorch pickles, which are not read"), ("tiny.gguf", "GGUF files, which are not read")],
)
def test_a_repository_without_safetensors_is_refused(hub: FakeHub, tmp_path: Path, file: str, reason: str) -> None:
    """It says what is there instead."""
    bare = hub.repositories["acme/bare"] = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(hub.repositories[NAME] / name, bare)
    (bare / file).touch()

    with pytest.raises(ConfigurationError, match=f"acme/bare has {reason}"):
        fetch(model="acme/bare")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (
            "lost.safetensors",
            r"acme/tiny-qwen3: model\.safetensors\.index\.json names lost\.safetensors, which the rep",
        ),
        ("*.bin", r"index\.json names '\*\.bin': it may name safetensors files alone"),
        ("", r"index\.json names '': it may name safetensors files alone"),
    ],
)
def test_an_index_that_names_other_files_is_refused_before_its_weights_come(
    hub: FakeHub, file: str, reason: str
) -> None:
    """Those that the repository has not, or that are no safetensors: it is no pattern of what to download."""
    path = hub.repositories[NAME] / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))

    with pytest.raises(ConfigurationError, match=reason):
        fetch()

    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.names("GET"))


def test_whoever_may_not_read_a_model_is_told_why(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such name, private, gated, a token that is wrong, a revision that is not there; the right token is taken."""
    hub.private.add(NAME)
    with pytest.raises(ConfigurationError, match="no model of that name, or it is private: then set HF_TOKEN"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigurationError, match="does not accept your token: set HF_TOKEN to one that is valid"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(ConfigurationError, match="no model of that name, or your token may not read it"):
        fetch(model="acme/other")
    with pytest.raises(ConfigurationError, match="acme/tiny-qwen3 has no revision v9"):
        fetch(revision="v9")
    hub.gated.add(NAME)
    with pytest.raises(ConfigurationError, match=f"is gated: ask for access at {hub.url}/acme/tiny-qwen3"):
        fetch()
    hub.gated.clear()
    assert fetch(revision=COMMIT).directory.name == COMMIT


def test_a_service_has_its_token_from_systemd(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one; a variable comes first."""
    hub.private.add(NAME)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "to be undone at the end")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigurationError, match="it is private: then set HF_TOKEN"):
        fetch()
    (tmp_path / "odriver.hf-token").write_text(f"{hub.token}\n")

    assert fetch().directory.name == COMMIT


@pytest.mark.usefixtures("hub")
def test_without_a_network_the_cache_serves_or_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is complete is served; of another it is said how to bring it here."""
    assert fetch().directory.name == COMMIT
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")

    assert fetch().directory.name == COMMIT
    with pytest.raises(DownloadFailed, match=r"cannot be reached .* `hf download acme/other --local-dir DIR`"):
        fetch(model="acme/other")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set: unset it, or `hf download acme/other`"):
        fetch(model="acme/other")


@pytest.mark.thorough
def test_a_name_is_served(hub: FakeHub, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``odriver serve``, from an empty cache; what the file says is what a request gets that says nothing."""
    model = build_checkpoint(hub.repositories[NAME], "qwen3", files=2, vocab_size=512)
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "32", "--num-pages", "4")

    with odriver("serve", NAME, "--bind", address, *flags), Client(address) as client:
        first, again = (client.complete("abc", ignore_eos=True) for _ in range(2))

        assert client.welcome.model == NAME
        assert client.welcome.default_sampling_params == {"temperature": 0.0, "max_tokens": 3}
    assert len(first.token_ids) == 3 and first.token_ids == again.token_ids


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("models/tiny.gguf", "GGUF files are not read"),
        ("qwen3:0.6b", "a name of Ollama's"),
        ("s3://bucket/model", "from directories, from gs:// and from the Hugging Face hub"),
        ("./models/tiny", "is not a directory"),
        ("models/of/mine", "is not a directory"),
        ("tiny", "is not a directory"),
        ("a" * 300, "is not a directory"),
    ],
)
def test_what_names_no_model_is_refused_in_words(name: str, reason: str) -> None:
    """With an example of what does."""
    with pytest.raises(ConfigurationError, match=reason):
        place_of(name)


@contextmanager
def another_user() -> Iterator[None]:
    """Nobody, for the while."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("closed", "reason"), [("home", "or not one that this user may see"), ("home/model", "that this user may not read")]
)
def test_a_directory_that_may_not_be_read_is_refused_in_words(closed: str, reason: str) -> None:
    """Whether it is the model's own or one above it."""
    with tempfile.TemporaryDirectory() as temporary:
        top, model = Path(temporary), Path(temporary) / "home" / "model"
        model.mkdir(parents=True)
        top.chmod(0o755)
        (top / closed).chmod(0o700)

        with another_user(), pytest.raises(ConfigurationError, match=f"{model} is .* {reason}"):
            place_of(str(model))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    "read",
    [
        lambda path: Root(path, "weights_root"),
        lambda path: HttpConfig(ssl_certfile=Path(path)),
        lambda path: chosen_generation_config(path, DEMO_MODEL),
        lambda path: obtained(EngineConfig(chat_template=Path(path)), print),
    ],
    ids=("root", "certificate", "generation_config", "chat_template"),
)
def test_what_else_may_not_be_seen_is_refused_in_words(read: Callable[[str], Any]) -> None:
    """Not by a traceback, which is of a fault that another start may mend."""
    with (
        tempfile.TemporaryDirectory() as closed,
        another_user(),
        pytest.raises(ConfigurationError, match=r"may (not )?see"),
    ):
        read(f"{closed}/mine/there")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_working_directory_that_may_not_be_read_takes_no_name_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a service that is started by hand from root's home."""
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)

    with another_user():
        assert place_of("Qwen/Qwen3-0.6B") is Place.HUB
        assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_model_is_called_as_it_was_named(tmp_path: Path) -> None:
    """A repository by its name, also by its directory in the cache, and any other directory by its own."""
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)

    assert place_of("Qwen/Qwen3-0.6B") is Place.HUB
    assert served_name("Qwen/Qwen3-0.6B") == served_name(str(snapshot)) == "Qwen/Qwen3-0.6B"
    assert (served_name(f"{tmp_path}/"), served_name("gs://bucket/some/model/")) == (tmp_path.name, "model")


def test_the_model_that_is_ours_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is called where nothing is named; a directory of that name comes first."""
    monkeypatch.chdir(tmp_path)
    ours, unnamed = fetch(model="demo", tokenizer="demo"), fetch(model=None)

    assert (ours.directory, ours.served_model_name) == (unnamed.directory, unnamed.served_model_name)
    assert (ours.directory, ours.served_model_name) == (DEMO_MODEL, ("demo",))
    assert EngineConfig(model="demo").directory == DEMO_MODEL
    shutil.copytree(DEMO_MODEL, tmp_path / "demo")
    assert fetch(model="demo").directory.resolve() == tmp_path / "demo"


def test_a_revision_is_of_a_repository(tmp_path: Path) -> None:
    """A directory has none."""
    with pytest.raises(ConfigurationError, match="revision is of a repository"):
        fetch(model=str(build_checkpoint(tmp_path)), revision="main")
