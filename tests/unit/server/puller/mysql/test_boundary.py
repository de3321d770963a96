"""Transactions of MySQL that are taken many at once are those that are taken one after the
other.
"""

import struct
import uuid
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.log.position import LogPosition, SavedPosition
from server.puller.mysql.transaction.commits import Commits, TransactionBoundaries
from server.puller.mysql.transaction.transactions import LoggedStatement, Transactions
from storage.mysql.event import Events, EventType
from tests.unit.storage.mysql.encode import event, events

SERVERS = [uuid.UUID(int=1 << 80 | number) for number in (1, 2)]
ORIGINAL = 1 << 55


class Commit(NamedTuple):
    server: int
    skipped: int
    """Numbers that another transaction took."""
    ms: int
    replica: bool
    kind: str


COMMITS = st.builds(
    Commit,
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 0, 0, 0, 2]),
    st.one_of(st.just(0), st.integers(1_700_000_000_000, 1_700_000_000_020)),
    st.booleans(),
    st.sampled_from(["rows"] * 12 + ["ddl", "rolled back", "anonymous", "schema BEGIN"]),
)


def query(sql: str, schema: str = "db") -> bytes:
    head = struct.pack("<IIBHH", 1, 0, len(schema), 0, 3)
    return event(EventType.QUERY, head + b"\x05\x01Z" + schema.encode() + b"\0" + sql.encode())


def log_of(commits: list[Commit]) -> list[bytes]:
    parts, last = [], [0, 0]
    for number, (server, skipped, ms, replica, kind) in enumerate(commits):
        last[server] += 1 + skipped
        anonymous = kind == "anonymous"
        times = struct.pack("<Q", 5 | ORIGINAL)[:7] + struct.pack("<Q", 1000 * ms)[:7]
        body = b"\0" + (
            bytes(24) if anonymous else SERVERS[server].bytes + struct.pack("<Q", last[server])
        )
        body += bytes(17) + (times if replica else times[7:]) + b"\x2a"
        gtid = event(33 + anonymous, body, timestamp=1_700_000_000)
        parts.append(gtid[:13] + struct.pack("<I", number) + gtid[17:])
        if kind == "ddl":
            parts.append(query("ALTER TABLE t ADD COLUMN x INT"))
            continue
        parts += [
            query("BEGIN", "BEGIN" if kind == "schema BEGIN" else "db"),
            event(EventType.TABLE_MAP, b"map"),
            event(EventType.WRITE_ROWS, b"row %d" % number),
            query("ROLLBACK") if kind == "rolled back" else event(EventType.XID, bytes(8)),
        ]
    return parts


def taken(transactions: Transactions, arrived: list[Events]) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for part in arrived:
        for item in transactions.take(part):
            if isinstance(item, Commits):
                rows = item.events.of(EventType.WRITE_ROWS)
                found += [(int(item.commit_ts[row]), item.events.body(int(row))) for row in rows]
            else:
                assert isinstance(item, LoggedStatement)
                found.append((item.commit_ts, item.query.sql.encode()))
    return found


@given(st.lists(COMMITS, max_size=60), st.integers(0, 300))
def test_many_at_once_are_what_one_after_the_other_are(commits: list[Commit], cut: int) -> None:
    parts = log_of(commits)
    many, one = (Transactions(LogPosition(SavedPosition(7, "", "binlog.000001"))) for _ in range(2))
    found = taken(many, [events(parts[:cut]), events(parts[cut:])])
    assert found == taken(one, [events([part]) for part in parts])
    assert many.position.snapshot == one.position.snapshot


def test_usual_transactions_are_plain_so_that_no_statement_of_theirs_is_read() -> None:
    usual = [Commit(0, 0, 1_700_000_000_000, replica, "rows") for replica in (False, True)]
    marks = TransactionBoundaries.of(events(log_of(usual * 9)))
    assert marks.plain.all()
    assert np.array_equal(marks.kinds[0::2], [EventType.GTID] * 18)
    marks = TransactionBoundaries.of(
        events(log_of([Commit(0, 0, 1, False, "ddl"), Commit(0, 0, 1, False, "rolled back")]))
    )
    assert not marks.plain.any()
