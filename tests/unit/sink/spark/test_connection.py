"""Retry and error rules of the Flight client; the calls themselves are tested on real sockets."""

import pickle
import threading
import time

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from pyspark_tidemark import connection
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import Credentials, parse


def test_an_unavailable_capture_is_replaced_by_the_next():
    asked = []

    def ask(uri):
        asked.append(uri)
        if uri == "a":
            raise fl.FlightUnavailableError("[TM:ErrNotResolved] later")
        return 7

    assert connection.first_answer(["a", "b"], ask) == 7
    assert asked == ["a", "b"]


def test_whoever_answered_last_is_asked_first(monkeypatch):
    monkeypatch.setattr(connection, "_last_answered", {})
    asked, dead = [], {"a"}

    def ask(uri):
        asked.append(uri)
        if uri in dead:
            raise fl.FlightUnavailableError("gone")
        return uri

    for expected in ("b", "b"):
        assert connection.last_good_first(("a", "b", "c"), ask) == expected
    dead.add("b")
    assert connection.last_good_first(("a", "b", "c"), ask) == "c"
    assert asked == ["a", "b", "b", "b", "a", "c"]


def test_when_all_stay_unavailable_the_last_error_is_told(monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.0)

    def ask(uri):
        raise fl.FlightUnavailableError("[TM:ErrNotResolved] later")

    with pytest.raises(SourceError, match="ErrNotResolved") as caught:
        connection.first_answer(["a"], ask)
    assert caught.value.retryable


def test_captures_are_asked_again_until_nobody_needs_the_answer():
    asked, pauses = [], []

    def ask(uri):
        asked.append(uri)
        raise fl.FlightUnavailableError("[TM:ErrChangefeedNotRunning] it is stopped")

    def pause(seconds):
        pauses.append(seconds)
        return len(pauses) == 3

    with pytest.raises(SourceError, match="ErrChangefeedNotRunning"):
        connection.first_answer(["a"], ask, pause=pause)
    assert (asked, len(pauses)) == (["a"] * 3, 3)


def test_a_changefeed_is_pickled_for_executors_whoever_pauses_its_calls():
    feed = Changefeed(parse({"endpoint": "grpc://a:1", "changefeed": "shop", "cuts": "true"}))
    feed.pause = threading.Event().wait
    assert pickle.loads(pickle.dumps(feed)).pause is time.sleep


@pytest.mark.parametrize(
    "err", [fl.FlightServerError("[TM:ErrTableNotFound] no"), pa.ArrowInvalid("bad ticket")]
)
def test_other_errors_are_told_at_once(err):
    def ask(uri):
        raise err

    with pytest.raises(SourceError) as caught:
        connection.first_answer(["a", "b"], ask)
    assert not caught.value.retryable


@pytest.mark.parametrize("uri", ["host:1", "http://host:1"])
def test_an_endpoint_that_is_no_flight_address_is_refused(uri):
    with pytest.raises(SourceError, match="ErrOptionInvalid"):
        connection.client(uri, Credentials())


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_that_is_missing_or_empty_is_told(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SourceError, match=rf"\[TM:ErrCredentials\] .*token file {path}"):
        connection.call_options(Credentials(token_file=str(path)), 1.0)


def test_a_token_file_that_is_being_replaced_gives_the_token_that_it_had(tmp_path):
    path = tmp_path / "token"

    def brought():
        return connection._token(str(path))

    path.write_text("first\n")
    assert brought() == b"first"
    path.write_text("")
    assert brought() == b"first"
    path.unlink()
    assert brought() == b"first"
    path.write_text("second\n")
    assert brought() == b"second"


@pytest.mark.parametrize(
    ("token_file", "answers", "waits"),
    [
        ("/token", [True, False, False, True], True),
        ("/token", [False], False),
        ("", [True, False], False),
    ],
    ids=["let in before", "never let in", "without a token"],
)
def test_who_was_let_in_by_a_token_waits_for_the_new_one(monkeypatch, token_file, answers, waits):
    monkeypatch.setattr(connection, "_authenticated", set())
    credentials = Credentials(token_file=token_file)
    pauses = []

    def ask(uri):
        with connection.token_may_change(uri, credentials):
            if not answers.pop(0):
                raise fl.FlightUnauthenticatedError("[TM:ErrUnauthenticated] who?")
            return uri

    def called():
        return connection.first_answer(["a"], ask, pause=pauses.append)

    if len(answers) > 1:
        assert called() == "a"
    if waits:
        assert called() == "a"
    else:
        with pytest.raises(SourceError, match="ErrUnauthenticated") as refused:
            called()
        assert not refused.value.retryable
    assert not answers
    assert len(pauses) == (2 if waits else 0)


def test_another_server_at_the_address_is_told_at_once_and_where_captures_are():
    def ask(uri):
        raise pa.ArrowNotImplementedError("unknown method DoAction for service FlightService")

    with pytest.raises(
        SourceError, match=r"ErrNoFlight\] grpc://a:8300 .* Flight port, 8301"
    ) as no:
        connection.first_answer(["grpc://a:8300", "b"], ask)
    assert not no.value.retryable


def test_nobody_at_the_address_is_told_with_where_captures_are(monkeypatch):
    monkeypatch.setattr(connection, "RETRY_S", 0.0)

    def ask(uri):
        raise fl.FlightUnavailableError("connection refused")

    with pytest.raises(SourceError, match=r"connection refused \(.* Flight port, 8301") as nobody:
        connection.first_answer(["grpc://a:1"], ask)
    assert (nobody.value.code, nobody.value.retryable) == ("ErrFlight", True)
