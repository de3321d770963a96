"""Who may read over Flight, by the token of a file."""

import pytest
from prometheus_client import REGISTRY

from server.capture.listener import readers_of
from server.config import ConfigError
from server.rpc import reloaded
from server.rpc.access_list import AccessFile, OpenAccess
from sink.flight.tokens import ReaderUnknownError, TokenFileError

OPEN = OpenAccess()


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch):
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0.0)


def reloads(outcome):
    name = "tidemark_capture_token_reloads_total"
    return REGISTRY.get_sample_value(name, {"outcome": outcome}) or 0.0


def is_unusable():
    labels = {"files": "the readers' token"}
    return REGISTRY.get_sample_value("tidemark_rpc_files_unusable", labels)


def test_a_new_token_is_asked_for_without_a_restart(tmp_path):
    path = tmp_path / "token"
    path.write_text("old-token\n")
    readers, before = readers_of(OPEN, str(path)), reloads("ok")
    readers.admit([b"old-token"])
    path.write_text("the-new-token\n")
    readers.admit([b"the-new-token"])
    with pytest.raises(ReaderUnknownError):
        readers.admit([b"old-token"])
    assert reloads("ok") == before + 1


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path):
    path = tmp_path / "token"
    path.write_text("old-token\n")
    readers, before = readers_of(OPEN, str(path)), reloads("failed")
    path.write_text("")
    readers.admit([b"old-token"])
    path.unlink()
    readers.admit([b"old-token"])
    assert reloads("failed") == before + 2
    assert is_unusable() == 1
    path.write_text("the-new-token\n")
    readers.admit([b"the-new-token"])
    assert is_unusable() == 0


def test_at_the_start_the_file_must_hold_a_token(tmp_path):
    assert readers_of(OPEN, "") is None
    with pytest.raises(TokenFileError):
        readers_of(OPEN, str(tmp_path / "none"))
    clients = tmp_path / "access.toml"
    clients.write_text("[[client]]\nname='a'\nrole='lake'\ncommon-name='a'\n")
    with pytest.raises(ConfigError):
        readers_of(AccessFile(str(clients)), str(tmp_path / "none"))
