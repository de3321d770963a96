"""What `resume --overwrite-checkpoint-ts` skips: said durably,
taken back where it is not delivered past.
"""

import pytest

from server.capture.flight import OwnerFeeds
from server.capture.service import changefeed_message
from server.changefeed.info import ChangefeedInfo, Skipped
from tests.unit.server.capture.conftest import new

TIME = "2026-01-02T03:04:05.678+00:00"


def info(*skipped):
    ranges = tuple(Skipped(start_ts, end_ts, TIME) for start_ts, end_ts in skipped)
    return ChangefeedInfo(
        id="a", sink_uri="delta:///lake", start_ts=1, target_ts=0, create_time=TIME, skipped=ranges
    )


@pytest.mark.parametrize(
    ("before", "checkpoint_ts", "start_ts", "after"),
    [
        ([], 100, 200, [(100, 200)]),
        ([(100, 200)], 200, 300, [(100, 200), (200, 300)]),
        ([(100, 200)], 250, 300, [(100, 200), (250, 300)]),
        ([(100, 200)], 200, 150, [(100, 150)]),
        ([(100, 200)], 200, 100, []),
        ([(100, 200)], 200, 50, []),
        ([(100, 200), (200, 300)], 300, 120, [(100, 120)]),
        ([(100, 200), (250, 300)], 300, 120, [(100, 200)]),
        ([(100, 200)], 250, 150, [(100, 200)]),
    ],
)
def test_going_on_elsewhere_says_what_is_skipped(before, checkpoint_ts, start_ts, after):
    moved = info(*before).continuing_at(start_ts, checkpoint_ts, TIME)
    assert [(each.start_ts, each.end_ts) for each in moved.skipped] == after
    assert moved.epoch == (1 if start_ts < checkpoint_ts else 0)
    assert ChangefeedInfo.from_json(moved.to_json()) == moved


def test_a_record_without_skipped_changes_is_what_earlier_captures_read():
    assert b"skipped" not in info().to_json()
    assert b"epoch" not in info().to_json()


async def test_a_resume_that_skips_is_shown_and_told_to_readers_after_a_restart(capture, upstream):
    upstream.now_ts = 2000
    owner = await capture.start()
    await owner.create(new("feed", "delta:///lake", 1000, 0, [capture.table]))
    await owner.pause("feed")
    await owner.resume("feed", 1500)
    await capture.stop()
    owner = await capture.start()
    feed = owner.feed("feed")
    assert [(each.start_ts, each.end_ts) for each in changefeed_message(feed).skipped] == [
        (1000, 1500)
    ]
    assert OwnerFeeds(owner).describe("feed").skipped == ((1000, 1500),)


async def test_a_checkpoint_that_moves_back_begins_another_epoch(capture, upstream):
    upstream.now_ts = 2000
    owner = await capture.start()
    await owner.create(new("feed", "delta:///lake", 1000, 0, [capture.table]))
    for ts, epoch in ((1500, 0), (1200, 1), (1300, 1), (1100, 2)):
        await owner.pause("feed")
        await owner.resume("feed", ts)
        assert OwnerFeeds(owner).describe("feed").epoch == epoch
    await capture.stop()
    owner = await capture.start()
    assert OwnerFeeds(owner).describe("feed").epoch == 2
