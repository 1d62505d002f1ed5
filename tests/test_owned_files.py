"""Files that root makes in directories of others, who may put links anywhere in them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ipc.errors import KeyFileError
from ipc.wire import keys, owned_files

OTHER = 4321
of_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of another user."""
    directory = tmp_path / "theirs"
    directory.mkdir()
    os.chown(directory, OTHER, OTHER)
    return directory


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of root's with a file, neither of which is to change."""
    directory = tmp_path / "etc"
    directory.mkdir()
    (directory / "shadow").write_text("secret")
    (directory / "shadow").chmod(0o600)
    return directory


def link(path: Path, target: Path) -> None:
    """As the other user makes it."""
    path.symlink_to(target)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def assert_untouched(victim: Path) -> None:
    """Nothing is new there, and nobody else's."""
    assert os.listdir(victim) == ["shadow"]
    assert (victim / "shadow").read_text() == "secret"
    assert [path.stat().st_uid for path in (victim, victim / "shadow")] == [0, 0]


@of_root
def test_keys_that_root_makes_for_a_service_are_the_services_to_read(theirs: Path, tmp_path: Path) -> None:
    """A file belongs to whom its directory belongs to; the client's own is where root wants it."""
    keys.new(theirs / "keys", "alice", tmp_path / "alice.key")

    made = [theirs / "keys", *(theirs / "keys").rglob("*")]
    assert {path.name: (path.stat().st_uid, path.stat().st_mode & 0o777) for path in made} == {
        "keys": (OTHER, 0o700), "server.toml": (OTHER, 0o600), "clients": (OTHER, 0o700), "alice.toml": (OTHER, 0o600),
    }  # fmt: skip
    assert (tmp_path / "alice.key").stat().st_uid == 0


@of_root
@pytest.mark.parametrize("name", ["keys", "keys/clients", "keys/server.toml", "keys/clients/alice.toml"])
@pytest.mark.parametrize("dangling", [False, True])
def test_no_link_of_theirs_leads_root_elsewhere(
    theirs: Path, victim: Path, tmp_path: Path, name: str, dangling: bool
) -> None:
    """Neither a directory's nor a file's, whether what it leads to is there or not: making a key fails."""
    (theirs / name).parent.mkdir(parents=True, exist_ok=True)
    is_file = name.endswith(".toml")
    link(theirs / name, victim / ("new" if dangling else "shadow" if is_file else ""))

    with pytest.raises(KeyFileError):
        keys.new(theirs / "keys", "alice", tmp_path / "alice.key")

    assert_untouched(victim)


@of_root
def test_root_reads_no_file_through_a_link_of_theirs(theirs: Path, victim: Path) -> None:
    """Its words would be in an error."""
    (theirs / "clients").mkdir()
    link(theirs / "clients" / "a.toml", victim / "shadow")

    with pytest.raises(KeyFileError, match=r"cannot read the key .*a\.toml"):
        keys.authorized(theirs)


@of_root
def test_a_pipe_in_place_of_a_key_is_no_key(theirs: Path) -> None:
    """Nobody waits for it."""
    (theirs / "clients").mkdir()
    os.mkfifo(theirs / "clients" / "a.toml")

    with pytest.raises(KeyFileError, match="it is no file"):
        keys.authorized(theirs)


@of_root
def test_a_link_swapped_in_while_a_file_is_made_is_not_followed(
    theirs: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given away is the open file, and not what has its name by then."""
    opened = os.open

    def open_and_swap(path: str, *arguments: int, **options: int) -> int:
        descriptor = opened(path, *arguments, **options)
        if str(path).startswith(".a."):
            (theirs / path).unlink()
            link(theirs / path, victim / "shadow")
        return descriptor

    monkeypatch.setattr(os, "open", open_and_swap)
    owned_files.create(theirs / "a", "key")

    assert_untouched(victim)


@of_root
def test_a_link_of_roots_is_followed(theirs: Path, tmp_path: Path) -> None:
    """As /var/lib/odriver is one, of systemd's; one that leads to itself is an error."""
    (tmp_path / "lib").symlink_to("theirs")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").symlink_to("theirs/a")

    owned_files.create(tmp_path / "lib" / "a", "key")

    assert owned_files.read(tmp_path / "file")[0] == b"key" and (theirs / "a").stat().st_uid == OTHER
    with pytest.raises(OSError, match="loop"):
        owned_files.create(tmp_path / "loop" / "a", "key")


@pytest.mark.parametrize("write", [owned_files.create, owned_files.replace])
def test_a_file_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], None]
) -> None:
    """Where the disk is full: neither an empty one nor what was begun; with room it can be made."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path / "a", "key")
    assert os.listdir(tmp_path) == []

    write(tmp_path / "a", "key")

    assert (tmp_path / "a").read_text() == "key" and os.listdir(tmp_path) == ["a"]


def test_a_file_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    """And stays as it is."""
    owned_files.create(tmp_path / "a", "key")

    with pytest.raises(FileExistsError):
        owned_files.create(tmp_path / "a", "another")

    assert (tmp_path / "a").read_text() == "key" and os.listdir(tmp_path) == ["a"]


def test_a_key_that_cannot_be_authorised_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can be made under the same name when there is room."""
    create = owned_files.create

    def full(path: Path, text: str) -> None:
        if path.parent.name == "clients":
            raise OSError(errno.ENOSPC, "No space left on device")
        create(path, text)

    with monkeypatch.context() as context:
        context.setattr(owned_files, "create", full)
        with pytest.raises(KeyFileError, match="No space"):
            keys.new(tmp_path / "keys", "alice", tmp_path / "alice.key")

    keys.new(tmp_path / "keys", "alice", tmp_path / "alice.key")


def test_a_file_is_created_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network's and a stick's; another of its name is left as it is there, too."""

    def link(*given: object, **options: object) -> None:
        del given, options
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    owned_files.create(tmp_path / "a", "key")

    assert (tmp_path / "a").read_text() == "key" and (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        owned_files.create(tmp_path / "a", "other")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "key"
