"""Backups of the metadata: what is written is read, and nothing else is."""

import json

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.meta.backup import Backup
from storage.model.errors import CorruptError

PAIRS = st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=50)), max_size=6)


@given(PAIRS)
def test_what_is_written_is_read(pairs: list[tuple[bytes, bytes]]) -> None:
    backup = Backup(b"/tidemark/", "2026-11-27T05:00:00+00:00", pairs, cluster_id=1 << 60)
    assert Backup.from_bytes(backup.to_bytes()) == backup


@given(PAIRS, st.data())
def test_a_file_that_is_cut_off_or_changed_is_refused(
    pairs: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    whole = Backup(b"/tidemark/", "2026-11-27T05:00:00+00:00", pairs).to_bytes()
    place = data.draw(st.integers(0, len(whole) - 2))
    with pytest.raises(CorruptError):
        Backup.from_bytes(whole[:place])
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        Backup.from_bytes(bytes(changed))


def test_another_format_or_a_later_version_is_refused_by_its_name() -> None:
    lines = Backup(b"/", "t", []).to_bytes().splitlines()
    head = json.loads(lines[0]) | {"version": 2}
    body = json.dumps(head).encode() + b"\n"
    text = body + json.dumps({"crc32c": google_crc32c.value(body)}).encode() + b"\n"
    with pytest.raises(CorruptError, match="version 2; this version reads"):
        Backup.from_bytes(text)
    for text in (b"hello", b"[" * 100_000):
        with pytest.raises(CorruptError, match="no backup"):
            Backup.from_bytes(text)


def test_a_backup_of_a_version_that_named_no_cluster_is_read() -> None:
    lines = Backup(b"/", "t", []).to_bytes().splitlines()
    head = json.loads(lines[0])
    del head["cluster_id"]
    body = json.dumps(head).encode() + b"\n"
    text = body + json.dumps({"crc32c": google_crc32c.value(body)}).encode() + b"\n"
    assert Backup.from_bytes(text) == Backup(b"/", "t", [])
