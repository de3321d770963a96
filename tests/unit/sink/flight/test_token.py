"""The readers' token: who does not bring it gets nothing, and it is told to nobody."""

import json

import pyarrow.flight as fl
import pytest

from sink.flight import server
from sink.flight.tokens import (
    OneToken,
    ReaderRefusedError,
    ReaderUnknownError,
    TokenFileError,
    read_token,
)
from tests.unit.sink.flight.test_server import Capture, serving, ticket

TOKEN = "a-long-token-of-readers"


def options(*headers):
    return fl.FlightCallOptions(headers=list(headers))


def ask(client, *headers):
    action = fl.Action("ack", json.dumps({"changefeed": "feed", "ts": 6}).encode())
    [result] = client.do_action(action, options(*headers))
    return json.loads(result.body.to_pybytes())


def test_who_brings_the_token_is_served():
    with serving(Capture(), OneToken(TOKEN)) as (_, client):
        assert ask(client, (b"authorization", f"Bearer {TOKEN}".encode())) == {"checkpoint_ts": 6}
        assert ask(client, (b"authorization", f"bearer  {TOKEN}".encode())) == {"checkpoint_ts": 6}
        rows = client.do_get(
            ticket(), options((b"authorization", f"Bearer {TOKEN}".encode()))
        ).read_all()
    assert rows.num_rows == 3


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (None, "wants a token"),
        (b"Bearer ", "not the one"),
        (b"Bearer another-token", "not the one"),
        (b"Basic " + TOKEN.encode(), "not the one"),
        (TOKEN.encode(), "not the one"),
        (b"Bearer " + TOKEN.encode()[:-1], "not the one"),
    ],
)
def test_anybody_else_is_told_why_not_and_never_the_token(header, named, capfd):
    headers = [] if header is None else [(b"authorization", header)]
    capture = Capture()
    with serving(capture, OneToken(TOKEN)) as (_, client):
        for call in (
            lambda: ask(client, *headers),
            lambda: client.do_get(ticket(), options(*headers)).read_all(),
            lambda: list(client.list_actions(options(*headers))),
        ):
            with pytest.raises(fl.FlightUnauthenticatedError, match=named) as caught:
                call()
            assert TOKEN not in str(caught.value)
    assert not capture.calls
    assert TOKEN not in "".join(capfd.readouterr())
    assert TOKEN not in repr(vars(OneToken(TOKEN)))


class Revoked:
    """Readers who are known until `ends` is raised; rows come slowly enough to be asked again."""

    def __init__(self):
        self.ends = None

    def admit(self, tokens):
        if isinstance(self.ends, ReaderUnknownError):
            raise self.ends
        return self.may_read

    def may_read(self, changefeed):
        assert changefeed == "feed"
        if self.ends is not None:
            raise self.ends


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        (ReaderUnknownError("who?"), fl.FlightUnauthenticatedError),
        (ReaderRefusedError("not yours any more"), fl.FlightUnauthorizedError),
    ],
)
def test_rows_end_once_their_reader_may_read_no_more(ends, error, monkeypatch):
    monkeypatch.setattr(server, "_RECHECK_S", 0.0)
    readers, capture = Revoked(), Capture()
    batches = capture._batches

    def revoked_meanwhile():
        for number, batch in enumerate(batches()):
            if number == 1:
                readers.ends = ends
            yield batch

    capture._batches = revoked_meanwhile
    with serving(capture, readers) as (_, client):
        rows = client.do_get(ticket(), options())
        assert rows.read_chunk().data.num_rows == 1
        with pytest.raises(error, match=str(ends)[:-1]):
            rows.read_chunk()


def test_a_token_file_is_read_without_its_line_end(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    assert read_token(str(path)) == TOKEN


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", b"a\nb"])
def test_a_token_file_that_holds_none_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(TokenFileError, match="token file"):
        read_token(str(path))
    with pytest.raises(TokenFileError, match="No such file"):
        read_token(str(tmp_path / "none"))
