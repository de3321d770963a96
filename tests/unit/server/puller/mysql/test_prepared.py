"""Rows of prepared XA transactions: as many bytes as wait are counted, no others."""

import pytest

from server.puller.mysql import prepared
from server.puller.mysql.errors import XaTooLargeError
from server.puller.mysql.prepared import Prepared
from storage.mysql.event import Events


def test_one_that_is_told_again_takes_no_more_room_and_what_has_ended_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "size_of", lambda _: 100)
    monkeypatch.setattr(prepared, "_BYTES_MAX", 200)
    parts = [Events.__new__(Events)]
    waiting = Prepared()
    for _ in range(3):
        waiting.put("a", parts)
    waiting.put("b", parts)
    with pytest.raises(XaTooLargeError, match="XA RECOVER"):
        waiting.put("c", parts)
    waiting = Prepared()
    for xid in ("a", "b", "c"):
        waiting.put(xid, parts)
        assert waiting.pop(xid) == parts
    assert waiting.pop("a") is None
