"""Rows of transactions that have not ended: within the limit in memory, beyond it on disk,
and gone with their end.
"""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from server.puller.mysql.log.position import LogPosition, SavedPosition
from server.puller.mysql.session.errors import XaTooLargeError
from server.puller.mysql.transaction import open_transaction
from server.puller.mysql.transaction.commits import Commits, size_of
from server.puller.mysql.transaction.transactions import Item, Transactions
from server.puller.open_transactions import OpenTransactions, OpenTransactionsClosedError
from storage.leveldb import CorruptDatabaseError, DirectoryUnusableError, LevelDB
from storage.mysql.event import EventType
from storage.spill_codec import PLAIN, SpillCodec
from tests.unit.server.puller.mysql.test_transactions import Log
from tests.unit.storage.mysql.encode import events

LIMIT = 64 << 10
ROW_BYTES = 1000
BUFFER_EVENTS = 30


class LargeLog(Log):
    """Rows of some size, no two alike."""

    def write(self, count: int) -> list[bytes]:
        bodies = super().write(count)
        padded = [body + random.Random(body).randbytes(ROW_BYTES) for body in bodies]
        for place, body in enumerate(padded):
            event = self.parts[2 * place - 2 * count + 1]
            size = len(event) + ROW_BYTES
            self.parts[2 * place - 2 * count + 1] = (
                event[:9] + size.to_bytes(4, "little") + event[13:19] + body
            )
        return padded


@pytest.fixture(params=[PLAIN, SpillCodec("lz4", encrypted=True)], ids=repr)
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenTransactions]:
    codec = request.param
    with closing(OpenTransactions(tmp_path / "open", LIMIT, retry_s=0.001, codec=codec)) as opened:
        yield opened


def reading(shared: OpenTransactions | None) -> Transactions:
    return Transactions(LogPosition(SavedPosition(0, "")), held_bytes=LIMIT, shared=shared)


def read(transactions: Transactions, log: Log, first: int = 0) -> Iterator[Item]:
    """The events from `first` on, some at a time."""
    for begin in range(first, len(log.parts), BUFFER_EVENTS):
        yield from transactions.take(events(log.parts[begin : begin + BUFFER_EVENTS]))


def rows(item: Commits) -> list[tuple[int, object]]:
    numbers = item.events.of(EventType.WRITE_ROWS_V1).tolist()
    return [(int(item.commit_ts[number]), item.events.body(number)) for number in numbers]


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_what_is_prepared_beyond_the_limit_is_on_disk_and_comes_out_whole_in_parts(
    shared: OpenTransactions, tmp_path: Path
) -> None:
    log, transactions = LargeLog(), reading(shared)
    for _ in range(3):
        log.prepare(1000, 300)
    for begin in range(0, len(log.parts), BUFFER_EVENTS):
        items = transactions.take(events(log.parts[begin : begin + BUFFER_EVENTS]))
        assert not any(isinstance(item, Commits) for item in items)
        assert shared.used_bytes <= LIMIT
    assert shared.spilled
    assert sum(path.stat().st_size for path in files(tmp_path)) > 800 * ROW_BYTES
    began = len(log.parts)
    for commit in (True, False, True):
        log.finish(1001, commit=commit)
    found = []
    for item in read(transactions, log, began):
        if isinstance(item, Commits):
            found += rows(item)
            assert size_of(item.events) <= 2 * LIMIT, "it is never in memory as a whole"
            assert shared.used_bytes <= LIMIT
    assert found == log.wanted
    assert transactions.is_at_rest
    assert (shared.spilled, shared.used_bytes, files(tmp_path)) == (0, 0, [])


def test_a_break_of_the_connection_forgets_what_is_read_again_on_disk_too(
    shared: OpenTransactions, tmp_path: Path
) -> None:
    log, transactions = LargeLog(), reading(shared)
    log.prepare(1000, 300)
    for begin in range(0, len(log.parts) - BUFFER_EVENTS, BUFFER_EVENTS):
        assert not [*transactions.take(events(log.parts[begin : begin + BUFFER_EVENTS]))]
    assert files(tmp_path)
    transactions.reconnected(fold_case=False)
    assert (shared.spilled, shared.used_bytes, files(tmp_path)) == (0, 0, [])
    log.finish(1001, commit=True)
    assert [
        row for item in read(transactions, log) if isinstance(item, Commits) for row in rows(item)
    ] == log.wanted


def test_without_a_directory_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_transaction, "_BYTES_MAX", 100 * ROW_BYTES)
    log, transactions = LargeLog(), reading(None)
    for _ in range(4):
        log.prepare(1000, 90)
        log.finish(1001, commit=True)
    assert [
        row for item in read(transactions, log) if isinstance(item, Commits) for row in rows(item)
    ] == log.wanted
    began = len(log.parts)
    log.prepare(1000, 150)
    with pytest.raises(XaTooLargeError, match="XA RECOVER"):
        list(read(transactions, log, began))


def test_a_disk_that_refuses_holds_the_log_until_it_takes_more(
    shared: OpenTransactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refusals = LevelDB.write, iter([DirectoryUnusableError("no space")] * 5)

    def sometimes(*args: object, **named: object) -> None:
        for refusal in refusals:
            raise refusal
        write(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(LevelDB, "write", sometimes)
    log, transactions = LargeLog(), reading(shared)
    log.prepare(1000, 300)
    log.finish(1001, commit=True)
    assert [
        row for item in read(transactions, log) if isinstance(item, Commits) for row in rows(item)
    ] == log.wanted


def test_whoever_waits_for_the_disk_is_let_go(
    shared: OpenTransactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        transactions.end()
        raise DirectoryUnusableError("no space")

    monkeypatch.setattr(LevelDB, "write", refuse)
    log, transactions = LargeLog(), reading(shared)
    log.prepare(1000, 300)
    with pytest.raises(OpenTransactionsClosedError):
        list(read(transactions, log))


def test_what_is_damaged_on_disk_is_not_given(shared: OpenTransactions, tmp_path: Path) -> None:
    log, transactions = LargeLog(), reading(shared)
    log.prepare(1000, 8000)
    assert not [item for item in read(transactions, log) if isinstance(item, Commits)]
    for database in shared._databases:  # or LevelDB deletes files meanwhile, when it merges them
        database.compact(b"", b"")
    for table in (tmp_path / "open").rglob("*.ldb"):
        with table.open("r+b") as file:  # in place: it may be mapped
            for place in range(0, table.stat().st_size, 512):
                file.seek(place)
                file.write(b"damaged")
    began = len(log.parts)
    log.finish(1001, commit=True)
    with pytest.raises(CorruptDatabaseError):
        list(read(transactions, log, began))
