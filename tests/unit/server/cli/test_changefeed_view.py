"""What `tidemark cli changefeed query --json` prints: members may be added, none may change."""

import json
from pathlib import Path

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.cli.changefeed_view import detail, summary

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
    error=pb.RunningError(code="ErrSorterBlockCorrupt", message="a block is damaged", time="2026-11-21T10:05:00+00:00"),
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
    schema_changes=[pb.SchemaChange(commit_ts=470615457568391170, query="DROP TABLE old", dropped=["shop.old"])],
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
        time="2026-11-21T10:05:01+00:00",
        error=pb.RunningError(code="ErrTargetFull", message="make room", time="2026-11-21T10:05:01+00:00"),
    ),
    skipped=[pb.SkippedRange(start_ts=470615457568391169, end_ts=470615458987114497, time="2026-11-21T10:05:02+00:00")],
)


def test_the_members_of_a_changefeed_are_as_ever():
    assert detail(CHANGEFEED) == json.loads(GOLDEN.read_text())


def test_the_list_shows_state_and_checkpoint():
    shown = summary(CHANGEFEED)
    assert (shown["id"], shown["summary"]["state"], shown["summary"]["tso"]) == (
        "shop-to-lake",
        "warning",
        470615458987114497,
    )
