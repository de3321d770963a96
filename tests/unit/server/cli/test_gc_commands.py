"""The arguments and texts of the GC commands that need no cluster."""

import argparse
import io
import json
from types import SimpleNamespace

import pytest
from kvproto import pdpb_pb2 as pdpb

from server.cli import cli, gc_blockers
from server.cli.arguments import NotConfirmedError
from server.cli.gc_blockers import NULL_KEYSPACE, _confirm, keyspace_id, removed_names
from server.cli.remote import RemoteError
from server.rpc.pd import PdUnavailableError

TS = 470606398860820488


def run(capsys, *arguments):
    assert cli.run([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("text", [str(TS), hex(TS)])
def test_a_timestamp_is_decoded_without_a_cluster(capsys, text):
    shown = json.loads(run(capsys, "--json", "tso", text))
    assert shown == {
        "tso": TS,
        "time": "2026-11-21T00:29:02.920+00:00",
        "physical_ms": 1795220942920,
        "logical": 8,
    }
    assert run(capsys, "tso", "0").splitlines()[1] == "time: "


@pytest.mark.parametrize("text", ["yesterday", "-1", str(1 << 64), ""])
def test_what_is_no_timestamp_is_bad_usage(capsys, text):
    with pytest.raises(SystemExit) as left:
        cli.run(["tso", text])
    assert left.value.code == 2


def test_names_to_think_away():
    assert removed_names("remove=a,b") == ["a", "b"]
    for text in ("a", "remove=", "remove=,", "delete=a"):
        with pytest.raises(argparse.ArgumentTypeError, match="write --what-if remove=NAME"):
            removed_names(text)


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("16777215", 16777215), ("null", NULL_KEYSPACE)]
)
def test_keyspace_ids(text, number):
    assert keyspace_id(text) == number


@pytest.mark.parametrize("text", ["16777216", "-1", "x", "4294967296", "٣"])
def test_what_is_no_keyspace_id_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no keyspace id"):
        keyspace_id(text)


def barrier(name, ts, ttl_s):
    return pdpb.GCBarrierInfo(barrier_id=name, barrier_ts=ts, ttl_seconds=ttl_s)


def test_a_state_has_pd_ctls_members_and_hides_the_expired():
    state = pdpb.GCState(
        keyspace_scope=pdpb.KeyspaceScope(keyspace_id=7),
        txn_safe_point=5,
        gc_safe_point=4,
        gc_barriers=[barrier("late", 9, 5), barrier("gone", 1, 0), barrier("br", 8, 1 << 62)],
    )
    shown = gc_blockers._state(state, SimpleNamespace(include_expired=False))
    assert shown == {
        "keyspace_id": 7,
        "is_keyspace_level_gc": False,
        "txn_safe_point": 5,
        "gc_safe_point": 4,
        "gc_barriers": [
            {"barrier_id": "br", "barrier_ts": 8, "ttl_seconds": 1 << 62},
            {"barrier_id": "late", "barrier_ts": 9, "ttl_seconds": 5},
        ],
    }
    assert len(gc_blockers._state(state, SimpleNamespace(include_expired=True))["gc_barriers"]) == 3
    assert [
        line.split(", ")[1] for line in gc_blockers._barrier_lines(shown, "gc_barriers")[1:]
    ] == [
        "never ends",
        "ends in 5 s",
    ]


def test_an_error_in_the_header_is_the_commands_error():
    header = pdpb.ResponseHeader(error=pdpb.Error(type=pdpb.UNKNOWN, message="no keyspace 9"))
    with pytest.raises(RemoteError, match="no keyspace 9"):
        gc_blockers._checked(pdpb.GetGCStateResponse(header=header))


def test_the_safe_point_of_a_changefeed_is_never_deleted_on_a_yes_alone(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: "y\n"))
    with pytest.raises(NotConfirmedError, match="pass --yes to give its history up"):
        _confirm("ticdc-default-bank", {"state": "stopped", "summary": "…"})
    _confirm("br-1", {"state": "foreign", "summary": "…"})
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(NotConfirmedError, match="Pass --yes"):
        _confirm("br-1", {"state": "foreign", "summary": "…"})


@pytest.mark.parametrize(
    "command", [["gc", "explain"], ["gc-state", "all"], ["service-gc-safepoint"]]
)
def test_no_coordinator_is_one_clear_error(monkeypatch, command):
    monkeypatch.setattr("server.rpc.pd._OPEN_SECONDS", 0.01)
    with pytest.raises(PdUnavailableError, match="name the coordinators with --pd"):
        cli.run(["--pd", "127.0.0.1:1", *command])
