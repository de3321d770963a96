"""Rows of open transactions within their limit: on disk beyond it,
and gone with their transaction.
"""

import asyncio
import random
from contextlib import closing
from pathlib import Path

import pytest
from kvproto import cdcpb_pb2 as cdcpb

from server.puller.open_transactions import ENTRY_BYTES, OpenTransactions
from server.puller.tikv.changes import Changes
from server.puller.tikv.matcher import Matcher
from storage.leveldb import DirectoryUnusableError, LevelDB
from tests.small_disk import small_disk
from tests.unit.server.puller.tikv.test_matcher import INITIALIZED, commit, prewrite
from tests.unit.server.puller.tikv.test_puller import (
    Pd,
    entries,
    initialized,
    pulling,
    region,
    send,
)

LIMIT = 64 << 10
Row = cdcpb.Event.Row


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def fed(matcher: Matcher, rows: list, out: Changes) -> None:
    """Apply rows as a puller does, some at a time."""
    for first in range(0, len(rows), 100):
        matcher.apply(rows[first : first + 100], out)
        matcher.spill_if_short()


def large(start_ts: int, count: int) -> list:
    return [
        prewrite(start_ts, b"%06d" % at, random.Random(at).randbytes(1000), old=b"o%d" % at)
        for at in range(count)
    ]


def test_a_transaction_beyond_the_limit_is_on_disk_and_comes_out_whole(tmp_path: Path) -> None:
    with closing(OpenTransactions(tmp_path / "open", LIMIT)) as shared:
        matcher, out, rows = Matcher(0, shared), Changes(), large(5, 2000)
        most = 0
        matcher.apply([INITIALIZED], out)
        for first in range(0, len(rows), 100):
            matcher.apply(rows[first : first + 100], out)
            matcher.spill_if_short()
            most = max(most, shared.used_bytes)
        assert most <= LIMIT
        assert shared.spilled > 1800
        assert len(matcher) == 2000
        assert sum(path.stat().st_size for path in files(tmp_path)) > 1 << 20
        order = list(rows)
        random.Random(1).shuffle(order)
        fed(matcher, [commit(5, row.key, 9) for row in order], out)
        got = dict(
            zip(out.key, zip(out.value, out.old_value, out.commit_ts, strict=True), strict=True)
        )
        assert got == {row.key: (row.value, row.old_value, 9) for row in rows}
        assert out.key == [row.key for row in order]
        assert (shared.spilled, shared.used_bytes, files(tmp_path)) == (0, 0, [])


def test_a_rollback_and_the_end_of_a_region_remove_the_files(tmp_path: Path) -> None:
    with closing(OpenTransactions(tmp_path / "open", LIMIT)) as shared:
        left, right, out = Matcher(0, shared), Matcher(0, shared), Changes()
        for matcher in (left, right):
            fed(matcher, [INITIALIZED, *large(5, 300)], out)
        assert files(tmp_path)
        rolled_back = [Row(type=3, start_ts=5, key=b"%06d" % at) for at in range(300)]
        fed(left, rolled_back, out)
        assert len(left) == 0
        assert len(right) == 300
        right.clear()
        assert (shared.spilled, shared.used_bytes, files(tmp_path)) == (0, 0, [])
        assert not out


def test_commits_before_the_scan_ends_are_within_the_limit_too(tmp_path: Path) -> None:
    with closing(OpenTransactions(tmp_path / "open", LIMIT)) as shared:
        matcher, out = Matcher(0, shared), Changes()
        fed(matcher, [commit(5, b"%06d" % at, 9) for at in range(1000)], out)
        assert shared.used_bytes <= LIMIT < 1000 * ENTRY_BYTES
        fed(matcher, [*large(5, 1000), INITIALIZED], out)
        assert sorted(out.key) == [b"%06d" % at for at in range(1000)]
        assert len(matcher) == 0
        assert (shared.spilled, files(tmp_path)) == (0, [])


def test_maps_share_one_limit(tmp_path: Path) -> None:
    with closing(OpenTransactions(tmp_path / "open", LIMIT)) as shared:
        matchers = [Matcher(0, shared) for _ in range(10)]
        for matcher in matchers:
            matcher.apply(large(5, 30), Changes())
            matcher.spill_if_short()
            assert shared.used_bytes <= LIMIT
        assert sum(len(matcher) for matcher in matchers) == 300


def test_a_disk_that_refuses_once_is_written_again_with_what_is_there_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(OpenTransactions(tmp_path / "open", 0, retry_s=0.001)) as shared:
        matcher, out, rows = Matcher(0, shared), Changes(), large(5, 400)
        fed(matcher, [INITIALIZED, *rows[:200]], out)
        write, refusals = LevelDB.write, iter(range(3))

        def refuse(self: LevelDB, batch: object, *, sync: bool) -> None:
            if next(refusals, None) is not None:
                raise DirectoryUnusableError("no space")
            write(self, batch, sync=sync)

        monkeypatch.setattr(LevelDB, "write", refuse)
        fed(matcher, rows[200:], out)
        assert next(refusals, None) is None
        assert shared.disk_error == ""
        again = [
            prewrite(5, row.key, b"", old=row.old_value) for row in rows[:100]
        ]  # heartbeats change nothing
        fed(matcher, again, out)
        fed(matcher, [commit(5, row.key, 9) for row in rows], out)
        assert dict(zip(out.key, out.value, strict=True)) == {row.key: row.value for row in rows}
        assert (shared.spilled, files(tmp_path)) == (0, [])


async def test_a_full_disk_pauses_the_feed_which_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "24m") as disk,
        closing(OpenTransactions(disk / "open", LIMIT, retry_s=0.01)) as shared,
    ):
        async with pulling(Pd(region(1, b"", b"")), shared=shared) as (feeds, sorter, _, _):
            only = await feeds.next()
            filler = disk / "filler"
            filler.write_bytes(bytes(23 << 20))
            rows = large(15, 3000)
            await send(only, initialized())
            for first in range(0, 3000, 100):
                some = [
                    Row(type=1, op_type=1, start_ts=15, key=row.key, value=row.value)
                    for row in rows[first:][:100]
                ]
                await send(only, entries(*some))
            async with asyncio.timeout(60):
                while not shared.waiting:  # noqa: ASYNC110 - it waits in a thread
                    await asyncio.sleep(0.01)
            assert "free some space" in shared.disk_error
            filler.unlink()
            ends = [Row(type=2, op_type=1, start_ts=15, commit_ts=20, key=row.key) for row in rows]
            await send(only, entries(*ends), 20)
            await sorter.until(20)
            assert len(sorter.rows) == 3000
            assert shared.disk_error == ""


async def test_a_table_that_is_removed_while_the_disk_is_full_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DirectoryUnusableError("no space")

    monkeypatch.setattr(LevelDB, "write", refuse)
    with closing(OpenTransactions(tmp_path / "open", 0, retry_s=3600)) as shared:
        async with (
            asyncio.timeout(60),
            pulling(Pd(region(1, b"", b"")), shared=shared) as (feeds, _, _, _),
        ):
            only = await feeds.next()
            await send(
                only,
                initialized(),
                entries(Row(type=1, op_type=1, start_ts=15, key=b"k", value=b"v")),
            )
            while not shared.waiting:  # noqa: ASYNC110 - it waits in a thread
                await asyncio.sleep(0.01)
        assert shared.used_bytes == 0


async def test_a_batch_for_the_sorter_is_bounded_whatever_small_commits_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.puller.tikv.puller._BATCH_BYTES", 50_000)
    with closing(OpenTransactions(tmp_path / "open", LIMIT)) as shared:
        async with pulling(Pd(region(1, b"", b"")), shared=shared) as (feeds, sorter, _, _):
            only = await feeds.next()
            await send(only, initialized())
            for at in range(300):
                row = Row(type=1, op_type=1, start_ts=15, key=b"%04d" % at, value=bytes(2000))
                await send(only, entries(row))
            for at in range(300):
                await send(
                    only,
                    entries(Row(type=2, op_type=1, start_ts=15, commit_ts=20, key=b"%04d" % at)),
                )
            await send(only, 20)
            await sorter.until(20)
            assert len(sorter.rows) == 300
            assert max(sorter.sizes) <= 26
