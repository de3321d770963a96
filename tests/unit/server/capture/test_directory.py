"""A capture's data directory: one process, one id that stays,
and clear words where it cannot be used.
"""

import os
import uuid

import pytest

from server.capture.directory import DataDirError, lock


def test_the_id_stays_and_only_one_process_has_it(tmp_path):
    with lock(tmp_path / "capture") as identity:
        other = lock(tmp_path / "capture")
        with pytest.raises(DataDirError, match="another capture runs"):
            other.__enter__()
    with lock(tmp_path / "capture") as again:
        assert again == identity


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataDirError, match="choose another --data-dir"),
        lock(tmp_path / "file" / "capture"),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize("content", [b"\n", b"half-an-", b"\xff\xfe"])
def test_an_id_that_was_damaged_is_told_with_what_to_do(tmp_path, content):
    (tmp_path / "capture-id").write_bytes(content)
    with (
        pytest.raises(DataDirError, match=r"capture-id holds no capture id: .*; remove it"),
        lock(tmp_path),
    ):
        raise AssertionError("not reached")


def test_an_id_that_cannot_be_written_whole_is_not_there_at_all(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(DataDirError, match=r"cannot keep the capture's id in .*: No space left"),
        lock(tmp_path),
    ):
        raise AssertionError("not reached")
    assert [path.name for path in tmp_path.iterdir()] == ["LOCK"]
    monkeypatch.undo()
    with lock(tmp_path) as identity:
        assert (tmp_path / "capture-id").read_text() == f"{identity}\n"


def test_an_empty_file_as_a_crash_left_it_is_no_id(tmp_path):
    (tmp_path / "capture-id").write_bytes(b"")
    with lock(tmp_path) as identity:
        assert uuid.UUID(identity)
    with lock(tmp_path) as again:
        assert again == identity
