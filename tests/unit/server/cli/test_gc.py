"""What `tidemark cli gc` makes of what it reads, and which command lines it understands."""

import argparse
from typing import Any

import pytest
from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfig, format_instant
from gcsafepoint.worker.election import Leader
from server.cli.cli import cli_parser
from server.cli.gc import GCState, _would, document, line, report, setting
from server.gc_worker.view import Overview
from storage.model.ts import compose

NOW_MS = 10_000_000
LEADER = Leader("me", "host:x", format_instant(NOW_MS + 60_000), {}, "127.0.0.1:8302")


def seen(
    leader: Leader | None = LEADER, config: GCConfig | None = None, **round_: Any
) -> dict[str, Any]:
    newest = gc_pb2.GCRound(id=5, phase="ended", **round_) if round_ else None
    held = Overview(leader, format_instant(NOW_MS - 60_000), compose(NOW_MS - 30_000), None, [])
    return report(GCState(NOW_MS, 7, held, config or GCConfig(), "", newest))


def test_a_healthy_worker_needs_no_advice() -> None:
    status = seen(result="done")
    assert (status["advice"], status["blocker"], status["behind_seconds"]) == ("", "", 30)
    assert status["leader"]["leads"]
    assert status["next_run_time"] == format_instant(NOW_MS + 540_000)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (seen(leader=None), "start one with `tidemark gc-worker`"),
        (seen(leader=Leader("me", "", format_instant(NOW_MS - 1000), {})), "no gc worker leads"),
        (seen(leader=Leader("me", "", "nonsense", {})), "no gc worker leads"),
        (seen(config=GCConfig(enable=False)), "gc config set tikv_gc_enable=true"),
        (
            seen(blocker="the service feed"),
            "held back by the service feed; `tidemark cli gc explain`",
        ),
        (seen(error="[TM:ErrX] away"), "the next one does what is left"),
    ],
)
def test_the_status_says_what_to_do(status: dict[str, Any], advice: str) -> None:
    assert advice in status["advice"]


def test_a_running_round_shows_how_far_it_is_and_how_long_it_will_take() -> None:
    it = gc_pb2.GCRound(id=1, phase="resolve locks", total=8, done=2, resolved_locks=5, eta_ms=3000)
    assert line(it) == "resolve locks: 2 of 8, 5 locks resolved, about 3s left"
    shown = document(it)
    assert (shown["progress"], shown["eta_seconds"], shown["seconds"], shown["result"]) == (
        "2 of 8",
        3.0,
        None,
        "running",
    )
    assert line(gc_pb2.GCRound(phase="prepare")) == "prepare: begins, 0 locks resolved"


def test_an_ended_round_shows_how_long_it_took() -> None:
    it = gc_pb2.GCRound(
        id=1, phase="ended", started_ms=1000, ended_ms=3500, result="done", phase_ms={"do gc": 500}
    )
    shown = document(it)
    assert (shown["seconds"], shown["phase_seconds"], shown["progress"]) == (
        2.5,
        {"do gc": 0.5},
        "",
    )


def test_a_dry_run_says_it_in_one_sentence() -> None:
    plan = gc_pb2.GCPlan(
        enabled=True, fresh=True, mode="central", regions=4, locks=2, transactions=1
    )
    assert (
        _would(plan)
        == "resolve 2 locks of 1 transactions in 4 regions, destroy 0 ranges, collect region by region"
    )
    held = gc_pb2.GCPlan(enabled=True, blocker="the service feed")
    assert _would(held).endswith(
        "nothing else: the safepoint does not move, held back by the service feed"
    )
    assert "refuse" in _would(gc_pb2.GCPlan())


def test_settings_are_name_and_value() -> None:
    assert setting("tikv_gc_life_time = 24h") == ("tikv_gc_life_time", "24h")
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=VALUE"):
        setting("tikv_gc_life_time")


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["run", "--wait"],
        ["run", "--dry-run", "--gc-worker", "h:1"],
        ["config"],
        ["config", "get"],
        ["config", "get", "tikv_gc_mode"],
        ["config", "set", "tikv_gc_mode=central"],
        ["history", "-n", "5", "--json"],
        ["ranges", "--state", "failed"],
        ["safepoint"],
    ],
)
def test_the_verbs_are_understood(words: list[str]) -> None:
    assert callable(cli_parser().parse_args(["gc", *words]).command)


@pytest.mark.parametrize(
    "words", [["config", "set"], ["config", "set", "x"], ["ranges", "--state", "odd"], ["frob"]]
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli_parser().parse_args(["gc", *words])
    assert caught.value.code == 2
