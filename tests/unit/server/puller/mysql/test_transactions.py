"""Whatever buffers a log comes in, and wherever its connection breaks: the same transactions,
never half of one.
"""

import itertools
import json
import struct
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.puller.mysql.log.position import LogPosition, SavedPosition, TimeLimits
from server.puller.mysql.session.errors import (
    LogDamagedError,
    MySqlUnavailableError,
    TornTransactionError,
    TransactionInterruptedError,
)
from server.puller.mysql.transaction.commits import Commits
from server.puller.mysql.transaction.open_transaction import UnclearSavepoint
from server.puller.mysql.transaction.transactions import (
    HELD_BYTES,
    LoggedStatement,
    Transactions,
    UndecidedTimes,
    UnpreparedXaCommit,
)
from server.puller.open_transactions import OpenTransactions
from storage.model.ts import compose
from storage.mysql.compressed import expanded
from storage.mysql.event import EventType
from tests.unit.storage.mysql.encode import event, events, payload

STANDALONE, DDL, PREPARED, COMPLETED = 1, 32, 64, 128
MYSQL: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[4] / "golden/mysql_events.json").read_text(encoding="utf-8")
)
MAP = bytes(8) + b"\1d\0\1t\0"
FDE = event(EventType.FORMAT_DESCRIPTION, bytes(60))

_TRANSACTIONS = ["many", "one", "ddl", "select", "rollback"]
_PREPARED = ["prepare", "commit", "undo", "unknown"]


@dataclass
class Log:
    """Events of a server, and what should come of them: (commit_ts,
    the bodies of row events) and statements.
    """

    parts: list[bytes] = field(default_factory=list)
    wanted: list[tuple[int, object]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """How many events each transaction ends after."""
    ts: int = 0
    seq: int = 0
    rows: int = 0
    prepared: dict[bytes, list[bytes]] = field(default_factory=dict)

    def begin(self, flags: int, second: int, xid: bytes = b"") -> None:
        self.seq += 1
        self.ts = max(self.ts + 2, compose(second * 1000))
        tail = (
            struct.pack("<IBB", 1, len(xid), 0) + xid
            if flags & (PREPARED | COMPLETED)
            else bytes(6)
        )
        gtid = event(
            EventType.MARIADB_GTID, struct.pack("<QIB", self.seq, 0, flags) + tail, timestamp=second
        )
        next_position = struct.pack("<I", len(self.parts) + 1)
        self.parts.append(gtid[:13] + next_position + gtid[17:])

    def write(self, count: int) -> list[bytes]:
        bodies = []
        for _ in range(count):
            self.rows += 1
            bodies.append(b"row %d" % self.rows)
            self.parts += [
                event(EventType.TABLE_MAP, MAP),
                event(EventType.WRITE_ROWS_V1, bodies[-1]),
            ]
        return bodies

    def query(self, sql: str) -> None:
        self.parts.append(
            event(EventType.QUERY, struct.pack("<IIBHH", 1, 0, 2, 0, 0) + b"db\0" + sql.encode())
        )

    def end(self, *wanted: tuple[int, object]) -> None:
        self.wanted += wanted
        self.ends.append(len(self.parts))

    def transaction(self, second: int, count: int) -> None:
        self.begin(0, second)
        bodies = self.write(count)
        self.parts.append(event(EventType.XID, bytes(8)))
        self.end(*((self.ts, body) for body in bodies))

    def ddl(self, second: int) -> None:
        self.begin(STANDALONE | DDL, second)
        self.query(f"ALTER TABLE t{self.seq} ADD COLUMN x INT")
        self.end((self.ts - 1, f"ALTER TABLE t{self.seq} ADD COLUMN x INT"))

    def create_select(self, second: int, count: int) -> None:
        self.begin(DDL, second)
        self.query("CREATE TABLE c (id INT)")
        bodies = self.write(count)
        self.parts.append(event(EventType.XID, bytes(8)))
        self.end((self.ts - 1, "CREATE TABLE c (id INT)"), *((self.ts, body) for body in bodies))

    def rolled_back(self, second: int, count: int) -> None:
        self.begin(0, second)
        self.write(count)
        self.query("ROLLBACK")
        self.end()

    def prepare(self, second: int, count: int) -> None:
        xid = b"x%d" % self.seq
        self.begin(PREPARED, second, xid)
        self.prepared[xid] = self.write(count)
        self.query(f"XA END X'{xid.hex()}',X'',1")
        self.parts.append(
            event(EventType.XA_PREPARE, struct.pack("<BIII", 0, 1, len(xid), 0) + xid)
        )
        self.end()

    def finish(self, second: int, *, commit: bool) -> None:
        if not self.prepared:
            return
        xid, bodies = self.prepared.popitem()
        self.begin(STANDALONE | COMPLETED, second, xid)
        self.query(f"XA {'COMMIT' if commit else 'ROLLBACK'} X'{xid.hex()}',X'',1")
        self.end(*((self.ts, body) for body in bodies if commit))

    def finish_unknown(self, second: int) -> None:
        """Commit what was prepared before the log began."""
        xid = b"u%d" % self.seq
        self.begin(STANDALONE | COMPLETED, second, xid)
        self.query(f"XA COMMIT X'{xid.hex()}',X'',1")
        self.end((self.ts, "unknown"))

    def torn(self, second: int, count: int) -> None:
        """The server dies in a transaction and begins another log."""
        ts, seq = self.ts, self.seq
        self.begin(0, second)
        self.write(count)
        self.parts.append(FDE)
        self.ts, self.seq = ts, seq
        self.ends.append(len(self.parts))


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    for _ in range(draw(st.integers(0, 12))):
        second = draw(st.integers(1000, 1003))
        many = st.integers(1, 30)
        kind = draw(st.sampled_from([*_TRANSACTIONS, *_PREPARED, "torn"]))
        if kind == "many":
            for _ in range(draw(many)):
                log.transaction(second, 1)
        elif kind == "ddl":
            log.ddl(second)
        elif kind == "unknown":
            log.finish_unknown(second)
        elif kind in ("commit", "undo"):
            log.finish(second, commit=kind == "commit")
        else:
            write = {
                "one": log.transaction,
                "select": log.create_select,
                "rollback": log.rolled_back,
            }
            (write | {"prepare": log.prepare, "torn": log.torn})[kind](
                second, draw(st.integers(0, 3))
            )
    return log


def taken(transactions: Transactions, parts: list[bytes]) -> list[tuple[int, object]]:
    found: list[tuple[int, object]] = []
    for item in transactions.take(events(parts)):
        if isinstance(item, LoggedStatement):
            found.append((item.commit_ts, item.query.sql))
        elif isinstance(item, UnpreparedXaCommit):
            found.append((item.commit_ts, "unknown"))
        elif isinstance(item, Commits):
            kinds = item.events.types
            numbers = (kinds == EventType.WRITE_ROWS_V1).nonzero()[0].tolist()
            found += [(int(item.commit_ts[number]), item.events.body(number)) for number in numbers]
            assert item.part or item.ends[-1] == len(item.events)
    return found


@pytest.mark.parametrize("limit", [1 << 30, 1000, 0])
@settings(max_examples=60)
@given(logs(), st.lists(st.integers(0, 200)))
def test_any_buffers_give_the_same_transactions(limit: int, log: Log, cuts: list[int]) -> None:
    borders = sorted({0, len(log.parts), *(cut % (len(log.parts) + 1) for cut in cuts)})
    found = []
    with (
        TemporaryDirectory() as directory,
        closing(OpenTransactions(Path(directory) / "open", limit)) as shared,
    ):
        transactions = Transactions(LogPosition(SavedPosition(0, "")), shared=shared)
        for begin, end in itertools.pairwise(borders):
            found += taken(transactions, log.parts[begin:end])
            assert shared.used_bytes <= limit
        assert bool(shared.spilled or shared.used_bytes) == bool(log.prepared), (
            "what has ended is held no more"
        )
    assert found == log.wanted
    assert (transactions.position.ts, transactions.is_at_rest) == (log.ts, not log.prepared)
    assert transactions.position.snapshot.gtids == (f"0-1-{log.seq}" if log.seq else "")


@given(st.sampled_from([HELD_BYTES, 200, 1]), logs(), st.integers(0, 200))
def test_a_connection_that_breaks_anywhere_is_gone_on_from_the_last_complete_transaction(
    held_bytes: int, log: Log, cut: int
) -> None:
    cut %= len(log.parts) + 1
    transactions = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=held_bytes)
    found = taken(transactions, log.parts[:cut])
    resumed = max((end for end in log.ends if end <= cut), default=0)
    try:
        transactions.reconnected(fold_case=False)
    except TransactionInterruptedError:
        # What was given is dropped with the sorter: the next run has new `Transactions`.
        assert held_bytes < HELD_BYTES
        found, resumed = [], 0
        transactions = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=held_bytes)
    assert found + taken(transactions, log.parts[resumed:]) == log.wanted


def test_a_connection_that_breaks_within_a_large_transaction_begins_a_new_run() -> None:
    """If the log went on, rows would stay of a transaction that another server never had."""
    log = Log()
    log.transaction(1000, 3)
    transactions = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1)
    assert taken(transactions, log.parts[:-1])
    with pytest.raises(TransactionInterruptedError) as interrupted:
        transactions.reconnected(fold_case=False)
    assert not isinstance(interrupted.value, MySqlUnavailableError), "the puller tries those again"


def test_a_large_transaction_is_given_as_it_comes_and_a_torn_one_is_told_and_then_left_out() -> (
    None
):
    log = Log()
    log.transaction(1000, 1)
    log.torn(1000, 3)
    log.transaction(1000, 1)
    eager = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1)
    with pytest.raises(TornTransactionError) as told:
        [taken(eager, [part]) for part in log.parts]
    torn = {told.value.transaction: told.value.rows}
    warned = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1, torn=torn)
    found = [each for part in log.parts for each in taken(warned, [part])]
    assert found == log.wanted, (
        "the transaction after it has its GTID and commit_ts, and is not left out"
    )
    assert warned.position.ts == log.ts


def test_a_torn_transaction_is_not_left_out_of_another_servers_log() -> None:
    log, other = Log(), Log()
    log.torn(1000, 3)
    other.seq = 6  # at the same place
    other.transaction(1000, 3)
    eager = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1)
    with pytest.raises(TornTransactionError) as failure:
        [taken(eager, [part]) for part in log.parts]
    torn = {failure.value.transaction: failure.value.rows}
    warned = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1, torn=torn)
    assert taken(warned, other.parts) == other.wanted


def test_parts_of_a_large_transaction_are_numbered_and_share_its_commit_ts() -> None:
    log = Log()
    log.transaction(1000, 3)
    eager = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=1)
    items = [
        item
        for part in log.parts
        for item in eager.take(events([part]))
        if isinstance(item, Commits)
    ]
    assert {int(ts) for item in items for ts in item.commit_ts} == {log.ts}
    assert [item.part for item in items] == [*range(1, len(log.parts)), 0]


def test_a_packed_transaction_is_given_as_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "server.puller.mysql.transaction.transactions.expanded", partial(expanded, piece_bytes=1000)
    )
    log = Log()
    log.transaction(1000, 500)
    eager = Transactions(LogPosition(SavedPosition(0, "")), held_bytes=5000)
    items = [*eager.take(events([log.parts[0], payload(b"".join(log.parts[1:]))]))]
    commits = [item for item in items if isinstance(item, Commits)]
    assert [item.part for item in commits] == [*range(1, len(commits)), 0]
    assert len(commits) > 5
    assert max(int(item.events.end[-1]) for item in commits) < 7000, "what may be held, and a piece"
    found = [(log.ts, item.events.body(int(row))) for item in commits for row in item.events.rows]
    assert found == log.wanted


@pytest.mark.parametrize("kind", [EventType.INCIDENT, EventType.XID])
def test_a_log_that_cannot_be_followed_is_refused(kind: EventType) -> None:
    with pytest.raises(LogDamagedError):
        taken(Transactions(LogPosition(SavedPosition(0, ""))), [event(kind, bytes(8))])


def test_a_commit_of_what_was_prepared_before_the_log_began_is_told() -> None:
    log = Log()
    log.prepare(1000, 2)
    began = len(log.parts)
    log.finish(1001, commit=True)
    rest = Transactions(LogPosition(SavedPosition(0, ""))).take(events([FDE, *log.parts[began:]]))
    assert [item.commit_ts for item in rest if isinstance(item, UnpreparedXaCommit)] == [
        compose(1001 * 1000)
    ]
    whole = Transactions(LogPosition(SavedPosition(0, ""))).take(events([FDE, *log.parts]))
    assert not [item for item in whole if isinstance(item, UnpreparedXaCommit)]


def test_what_was_committed_before_an_unknown_xa_commit_comes_before_it() -> None:
    """The puller resolves its tables up to the COMMIT: rows that came later would be lost."""
    log = Log()
    log.prepare(1000, 2)
    began = len(log.parts)
    log.transaction(1001, 1)
    before = log.ts
    log.finish(1002, commit=True)
    buffer = events([FDE, *log.parts[began:]])
    items = list(Transactions(LogPosition(SavedPosition(0, ""))).take(buffer))
    (refused,) = (n for n, item in enumerate(items) if isinstance(item, UnpreparedXaCommit))
    given = [item for item in items[:refused] if isinstance(item, Commits)]
    assert {int(ts) for item in given for ts in item.commit_ts} == {before}
    assert before < log.ts


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("asks", ["time", "savepoint"])
def test_what_was_committed_comes_before_an_item_for_which_the_server_is_asked(
    asks: str, count: int
) -> None:
    """If the server is gone, the puller goes on from `position`, which is behind these rows."""
    log = Log()
    for _ in range(count):
        log.transaction(1000, 1)
    before = log.ts
    if asks == "time":
        log.rolled_back(1000, 1)  # it ends a stretch that is taken at once
        log.transaction(2_000_000, 1)
    else:
        log.begin(0, 1000)
        log.write(1)
        log.query("ROLLBACK TO `unknown`")
    transactions = Transactions(
        LogPosition(SavedPosition(0, "")), time_limits=TimeLimits.accepting(1_000_000)
    )
    given: list[int] = []
    for item in transactions.take(events([FDE, *log.parts])):
        if isinstance(item, UndecidedTimes | UnclearSavepoint):
            break
        if isinstance(item, Commits):
            given += item.commit_ts.tolist()
    else:
        pytest.fail("the server is asked")
    assert transactions.position.ts >= before
    assert max(given, default=0) == before
    assert len(set(given)) == count


def test_behind_a_statement_without_a_place_the_log_goes_on_where_its_transaction_begins() -> None:
    """MariaDB 11.8 gives places to the first and last event of a transaction only."""
    log = Log()
    log.create_select(1000, 1)
    *within, end = log.parts
    end = end[:13] + struct.pack("<I", 9) + end[17:]
    items = Transactions(LogPosition(SavedPosition(0, ""))).take(events([*within, end]))
    (logged,) = [item for item in items if isinstance(item, LoggedStatement)]
    assert (logged.behind, logged.position) == (1, 9)


def test_a_statement_that_was_prepared_is_told_when_it_is_committed() -> None:
    log = Log()
    log.begin(PREPARED, 1000, b"x")
    log.query("XA START X'78',X'',1")
    log.query("UPDATE t SET v = 5")
    log.prepared[b"x"] = log.write(1)
    log.query("XA END X'78',X'',1")
    log.parts.append(event(EventType.XA_PREPARE, struct.pack("<BIII", 0, 1, 1, 0) + b"x"))
    log.end()
    log.finish(1001, commit=True)
    found = taken(Transactions(LogPosition(SavedPosition(0, ""))), log.parts)
    assert found == [(log.ts - 1, "UPDATE t SET v = 5"), *log.wanted]


@pytest.mark.parametrize("golden", MYSQL, ids=[each["version"] for each in MYSQL])
@pytest.mark.parametrize("kind", ["gtid", "tagged"])
def test_a_replica_of_mysql_gives_the_commit_ts_of_its_primary(
    golden: dict[str, Any], kind: str
) -> None:
    """The second in a replica's GTID event is that of the last statement, not of the commit."""
    positions = []
    for side in golden.get(kind, {}):
        gtid = bytes.fromhex(golden[kind][side])
        begin = event(EventType.QUERY, struct.pack("<IIBHH", 1, 0, 2, 0, 0) + b"db\0BEGIN")
        parts = [
            gtid[:9] + struct.pack("<I", len(gtid)) + gtid[13:],
            begin,
            event(EventType.XID, bytes(8)),
        ]
        transactions = Transactions(LogPosition(SavedPosition(7, "")))
        (item,) = list(transactions.take(events(parts)))
        assert isinstance(item, Commits)
        assert set(item.commit_ts.tolist()) == {transactions.position.ts}
        positions.append((transactions.position.ts, transactions.position.snapshot.gtids))
    assert len(set(positions)) == (kind in golden)


@pytest.mark.parametrize("golden", MYSQL, ids=[each["version"] for each in MYSQL])
def test_a_file_of_mysql_that_is_read_from_its_beginning_tells_the_gtids_before_it(
    golden: dict[str, Any],
) -> None:
    previous = bytes.fromhex(golden["previous"])
    transactions = Transactions(LogPosition(SavedPosition(7, "", "binlog.000002")))
    assert not list(
        transactions.take(events([previous[:9] + struct.pack("<I", len(previous)) + previous[13:]]))
    )
    assert transactions.position.snapshot.gtids == golden["executed"]
    read_on = Transactions(
        LogPosition(SavedPosition(7, "3c22d75d-e5e0-11f1-ba82-02fc00000001:1-2", "binlog.000002"))
    )
    assert not list(
        read_on.take(events([previous[:9] + struct.pack("<I", len(previous)) + previous[13:]]))
    )
    assert read_on.position.snapshot.gtids == "3c22d75d-e5e0-11f1-ba82-02fc00000001:1-2"


@pytest.mark.parametrize(("next_position", "reached"), [(500, 700), (0, 800)])
def test_only_a_rotate_of_the_log_itself_says_what_was_reached(
    next_position: int, reached: int
) -> None:
    rotate = event(EventType.ROTATE, struct.pack("<Q", 700) + b"binlog.000002")
    rotate = rotate[:13] + struct.pack("<I", next_position) + rotate[17:]
    transactions = Transactions(LogPosition(SavedPosition(9, "0-1-1", "binlog.000002", 800)))

    list(transactions.take(events([rotate])))

    assert (transactions.position.file, transactions.position.position) == (
        "binlog.000002",
        reached,
    )
