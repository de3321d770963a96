"""What `tidemark cli changefeed query --json` prints: members may be added, none may change."""

import json
from pathlib import Path

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.view import (
    detail,
    duration,
    history,
    statistics,
    summary,
    synced,
    unread_warning,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "changefeed" / "query.json"
CHANGEFEED = pb.Changefeed(
    id="shop-to-lake",
    state=pb.CHANGEFEED_STATE_WARNING,
    source_uri="mysql://tidemark@db:3306?password-file=/run/secrets/db",
    sink_uri="delta:///lake",
    start_ts=470615457568391169,
    checkpoint_ts=470615458987114497,
    resolved_ts=470615458987114498,
    create_time="2026-11-21T10:04:59.147+00:00",
    error=pb.RunningError(
        code="ErrSorterBlockCorrupt", message="a block is damaged", time="2026-11-21T10:05:00+00:00"
    ),
    filter=["shop.*", "!shop.tmp_*"],
    zero_dates="null",
    ignored_tables=["shop.heap"],
    tables=[
        pb.TableStatus(
            name="shop.orders",
            table_id=7,
            state=pb.TABLE_STATE_REPAIRING,
            resolved_ts=470615458987114498,
            checkpoint_ts=470615458987114497,
            schema_ts=470615457568391169,
        )
    ],
    schema_changes=[
        pb.SchemaChange(commit_ts=470615457568391170, query="DROP TABLE old", dropped=["shop.old"])
    ],
    holding=pb.Holding(
        regions=1,
        staged_bytes=2,
        disk_error="No space left on device",
        waiting=1,
        pulled_ts=470615458987114500,
        sorted_ts=470615458987114499,
    ),
    lake_job=pb.LakeJob(
        state="retrying",
        cut_ts=470615458987114497,
        commits="table",
        spark_ui="http://127.0.0.1:4040",
        time="2026-11-21T10:05:01+00:00",
        error=pb.RunningError(
            code="ErrTargetFull", message="make room", time="2026-11-21T10:05:01+00:00"
        ),
    ),
    skipped=[
        pb.SkippedRange(
            start_ts=470615457568391169, end_ts=470615458987114497, time="2026-11-21T10:05:02+00:00"
        )
    ],
    maintainer="b61d52d1-200f-4266-bae8-0b2f0f27e746",
)
NOW_S = 1795289545.5  # a time after the checkpoint


def test_the_members_of_a_changefeed_are_as_ever():
    assert detail(CHANGEFEED) == json.loads(GOLDEN.read_text())


def test_the_list_shows_state_and_checkpoint():
    shown = summary(CHANGEFEED, NOW_S)
    assert (shown["id"], shown["summary"]["state"], shown["summary"]["tso"]) == (
        "shop-to-lake",
        "warning",
        470615458987114497,
    )


def test_the_list_shows_the_lag_in_seconds_and_the_job():
    checkpoint_s = (CHANGEFEED.checkpoint_ts >> 18) / 1000
    assert summary(CHANGEFEED, checkpoint_s + 2.5)["summary"]["lag_seconds"] == 2.5
    assert summary(CHANGEFEED, checkpoint_s - 1)["summary"]["lag_seconds"] == 0  # clocks differ
    assert summary(CHANGEFEED, NOW_S)["summary"]["lake_job"] == "retrying"
    new = summary(pb.Changefeed(id="new"), NOW_S)["summary"]
    assert (new["lag_seconds"], new["lake_job"]) == (None, "none")


def test_a_lake_without_a_job_is_told():
    minute = 60_000 << 18
    feed = pb.Changefeed(
        id="shop", state=pb.CHANGEFEED_STATE_NORMAL, sink_uri="delta:///lake", checkpoint_ts=minute
    )
    feed.resolved_ts = 2 * minute
    assert "warnings" not in detail(feed)
    feed.resolved_ts += minute
    [warning] = detail(feed)["warnings"]
    assert "nobody reads this changefeed" in warning
    assert "tidemark spark run --changefeed shop --target delta:///lake" in warning
    feed.lake_job.state = "silent"
    assert len(detail(feed)["warnings"]) == 1
    feed.lake_job.state = "ready"
    assert "warnings" not in detail(feed)
    feed.ClearField("lake_job")
    feed.sink_uri = "flight://"
    assert "warnings" not in detail(feed)


def test_a_full_disk_of_the_capture_stands_in_the_list():
    """The state is `normal`, and the lag alone does not say why it grows."""
    feed = pb.Changefeed(id="shop", state=pb.CHANGEFEED_STATE_NORMAL, sink_uri="delta:///lake")
    assert "warnings" not in summary(feed, NOW_S)["summary"]
    feed.holding.disk_error = "No space left on device"
    [warning] = summary(feed, NOW_S)["summary"]["warnings"]
    assert warning.startswith("the capture cannot write to its disk: No space left on device; ")


def test_that_nobody_reads_is_told_with_how_long():
    feed = pb.Changefeed(
        id="shop",
        state=pb.CHANGEFEED_STATE_NORMAL,
        sink_uri="delta:///lake",
        reading=pb.Reading(idle_s=60, never=True),
    )
    assert unread_warning(feed) == ""
    assert detail(feed)["reading"] == {"idle_seconds": 60, "never": True}
    feed.reading.idle_s = 300
    assert "nobody has asked for its rows since it started, 5 min ago; " in unread_warning(feed)
    assert summary(feed, NOW_S)["summary"]["last_read"] == "never"
    feed.reading.never = False
    assert "nobody has asked for its rows in the last 5 min; " in unread_warning(feed)
    assert summary(feed, NOW_S)["summary"]["last_read"] == "5 min ago"
    feed.sink_uri = "flight://"
    assert "start your own reader" in unread_warning(feed)
    feed.lake_job.state = "ready"  # it may be busy with its tables
    assert unread_warning(feed) == ""
    feed.reading.idle_s = 3
    assert summary(feed, NOW_S)["summary"]["last_read"] == "now"


def test_durations_have_one_unit():
    assert list(map(duration, (0, 59, 60, 7199, 86_400 * 3))) == [
        "0 s",
        "59 s",
        "1 min",
        "1 h",
        "3 d",
    ]


def test_what_happened_is_told_from_the_oldest_on():
    events = [each["event"] for each in history(detail(CHANGEFEED))]
    assert events == ["created", "schema change", "error", "lake job", "left out"]


def ts_at(seconds: float) -> int:
    return int(seconds * 1000) << 18


def looked_at(
    *, checkpoint: float, last: float, rows: int = 0, state: str = "NORMAL"
) -> pb.Changefeed:
    """A changefeed with times in seconds since 1970."""
    return pb.Changefeed(
        id="shop",
        state=pb.ChangefeedState.Value(f"CHANGEFEED_STATE_{state}"),
        checkpoint_ts=ts_at(checkpoint),
        resolved_ts=ts_at(checkpoint + 2),
        delivery=pb.Delivery(rows=rows, last_ts=ts_at(last)),
    )


def test_it_is_synced_when_the_checkpoint_is_new_and_nothing_has_come_for_five_minutes() -> None:
    for checkpoint, last, state, is_synced, info in (
        (995, 600, "NORMAL", True, "nothing has changed for 6 min"),
        (995, 700, "NORMAL", False, "counts as synced after 5 min"),
        (985, 600, "NORMAL", False, "the target is 15 s behind"),
        (995, 600, "WARNING", True, "everything is at the target"),
        (995, 600, "STOPPED", False, "the changefeed is stopped"),
        (995, 600, "FAILED", False, "the changefeed is failed"),
        (100, 100, "FINISHED", True, "up to the target_ts"),
    ):
        told = synced(looked_at(checkpoint=checkpoint, last=last, state=state), 1000.0)
        assert (told["synced"], told["last_synced_ts"]) == (is_synced, ts_at(last))
        assert info in told["info"]
    quick = synced(looked_at(checkpoint=995, last=990), 1000.0, check_s=10, checkpoint_s=6)
    assert not quick["synced"], "not before the interval has passed"
    assert synced(looked_at(checkpoint=995, last=990), 1000.0, check_s=9, checkpoint_s=6)["synced"]


def test_statistics_are_of_the_time_between_two_looks() -> None:
    before = looked_at(checkpoint=990, last=980, rows=100)
    after = looked_at(checkpoint=995, last=994, rows=350)
    told = statistics(before, after, 1000.0, 10.0)
    assert (told["ops"], told["count"]) == (25, 350)
    assert (told["sink_gap"], told["replication_gap"]) == ("2000ms", "5000ms")
    assert statistics(after, before, 1000.0, 10.0)["ops"] == 0, "a new owner counts from 0"


def test_states_of_a_newer_capture_are_shown_by_their_numbers():
    table = pb.TableStatus(name="shop.orders", state=98)  # type: ignore[arg-type]  # of a later version
    newer = pb.Changefeed(id="a", state=99, tables=[table])  # type: ignore[arg-type]  # the same
    assert summary(newer, 0.0)["summary"]["state"] == "99"
    assert detail(newer)["tables"][0]["state"] == "98"
