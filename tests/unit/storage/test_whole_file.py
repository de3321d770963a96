"""What commands write is whole and durable, or as it was before."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from storage.whole_file import create_private_file, replace_file


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    create_private_file(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


def test_where_there_are_no_links_a_new_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = tmp_path / "token"
    create_private_file(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_private_file(path, b"new")
    assert path.read_bytes() == b"secret"
    assert [each.name for each in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("dangling", [True, False])
def test_a_name_that_is_taken_stays_as_it_is(tmp_path: Path, dangling: bool) -> None:
    path = tmp_path / "token"
    if dangling:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        create_private_file(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["token"]
    assert path.is_symlink() if dangling else path.read_bytes() == b"old"


def test_a_replaced_file_keeps_mode_and_link(tmp_path: Path) -> None:
    target, link = tmp_path / "v1" / "access.toml", tmp_path / "access.toml"
    target.parent.mkdir()
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in target.parent.iterdir()] == ["access.toml"]


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    replace_file(tmp_path / "access.toml", b"new")
    assert (tmp_path / "access.toml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("call", ["fsync", "fchmod", "fchown", "replace"])
def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "access.toml"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "replace") if call == "replace" else (os, call)), full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    monkeypatch.undo()
    assert [each.name for each in tmp_path.iterdir()] == ["access.toml"]
    assert path.read_bytes() == b"old"


def test_a_replaced_file_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "access.toml"
    path.write_bytes(b"old")
    owners: list[tuple[int, int]] = []

    def record(_file: int, user: int, group: int) -> None:
        owners.append((user, group))

    monkeypatch.setattr(os, "fchown", record)
    replace_file(path, b"new")
    assert owners == [(path.stat().st_uid, path.stat().st_gid)]


def test_links_that_go_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "a", b"new")


def test_a_directory_stays_as_it_was_given() -> None:
    """A link of /proc leads elsewhere than what it says: it is not followed by hand."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(f"/proc/self/root{directory}/file")
        replace_file(path, b"new")
        assert path.read_bytes() == b"new"
