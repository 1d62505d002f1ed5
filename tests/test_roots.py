"""Which paths may be read at run time, and that no other is."""

import os
from pathlib import Path

import pytest

from engine.errors import ConfigurationError
from engine.hub.roots import OutsideRoot, Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A directory with an adapter, beside one that nobody may see."""
    for directory in ("open/alice", "open/blobs", "secret/bob", "open-too/carol"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "adapter_config.json").touch()
    return Root(str(tmp_path / "open"), "adapter_root")


@pytest.mark.parametrize("path", ["alice", "./alice/", "blobs/../alice", "{root}/alice", "{root}/blobs//../alice"])
def test_what_is_below_the_root_is_found(root: Root, path: str) -> None:
    """By relative and by absolute paths."""
    assert root.find(path.format(root=root)) == f"{root}/alice"


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "/", "../secret/bob", "alice/../../secret/bob", "{root}/../secret/bob", "{root}", "/etc"),
        *(
            "{root}-too/carol",
            "alice\0/../bob",
            "al\nice",
            "a" * 2000,
            "gs://bucket/alice",
            "nobody",
            "alice/x/../../..",
        ),
        "alice/adapter_config.json",
    ],
)
def test_what_is_elsewhere_is_not(root: Root, path: str) -> None:
    """However it is written; neither is the root itself, what is not there, or what is no directory."""
    with pytest.raises(OutsideRoot):
        root.find(path.format(root=root))


def test_links_are_followed_before_they_are_judged(root: Root) -> None:
    """Of directories on the way and of files in them; one that stays below the root is as good as its target."""
    inside, outside = Path(str(root)), Path(str(root)).parent / "secret"
    (inside / "away").symlink_to(outside)
    (inside / "also").symlink_to("alice")
    (inside / "alice" / "weights").symlink_to("../blobs/adapter_config.json")

    assert root.find("also") == f"{root}/alice"
    for path in ("away", "away/bob"):
        with pytest.raises(OutsideRoot, match="not below adapter_root"):
            root.find(path)
    (inside / "alice" / "more").symlink_to(outside / "bob" / "adapter_config.json")
    with pytest.raises(OutsideRoot, match="alice/more is not below"):
        root.find("alice")


def test_a_link_to_nothing_is_named(root: Root) -> None:
    """The directory is there: what is said to be missing is the file."""
    Path(str(root), "alice", "README.md").symlink_to("nowhere")

    with pytest.raises(OutsideRoot, match=r"^alice/README.md is a link to a file that is not there$"):
        root.find("alice")


def test_a_pipe_is_not_read_for_ever(root: Root) -> None:
    """It is refused before anybody opens it."""
    os.mkfifo(Path(str(root), "alice", "adapter_model.safetensors"))

    with pytest.raises(OutsideRoot, match="is no file"):
        root.find("alice")


def test_a_bucket_is_a_root_by_its_prefix() -> None:
    """Nothing is asked of it, so nothing can lead out of it."""
    root = Root("gs://bucket/adapters/", "adapter_root")

    found = [root.find(path) for path in ("alice", "team/alice/", "gs://bucket/adapters/alice")]

    assert found == ["gs://bucket/adapters/alice", "gs://bucket/adapters/team/alice", "gs://bucket/adapters/alice"]
    for path in ("..", "alice/../../x", "gs://bucket/alice", "gs://other/adapters/alice", "/etc", "a//b", "a/./b"):
        with pytest.raises(OutsideRoot):
            root.find(path)


@pytest.mark.parametrize("root", ["/nowhere/at/all", "gs://", "gs://bucket/../x"])
def test_a_root_is_a_directory(root: str) -> None:
    """Or the daemon does not start."""
    with pytest.raises(ConfigurationError, match="adapter_root"):
        Root(root, "adapter_root")
