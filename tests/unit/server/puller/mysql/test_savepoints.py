"""ROLLBACK TO SAVEPOINT undoes the rows behind the savepoint, in whatever buffers they come,
given already or not.
"""

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.log.position import LogPosition, SavedPosition
from server.puller.mysql.session.errors import SavepointUnclearError, TornTransactionError
from server.puller.mysql.tables import Tables
from server.puller.mysql.transaction.commits import Commits
from server.puller.mysql.transaction.open_transaction import Torn, UnclearSavepoint
from server.puller.mysql.transaction.transactions import Item, Transactions
from server.puller.open_transactions import OpenTransactions
from storage.mysql.event import EventType
from tests.unit.server.puller.mysql.test_transactions import PREPARED, Log
from tests.unit.storage.mysql.encode import event, events

NAMES = ("a", "A", "b", "it`s", "x y")


@dataclass
class Server:
    """The transaction of a session with savepoints, as a server runs and logs it."""

    log: Log = field(default_factory=Log)
    rows: list[bytes] = field(default_factory=list)
    savepoints: list[tuple[str, int]] = field(default_factory=list)
    unclear: int = 0

    def write(self, count: int) -> None:
        self.rows += self.log.write(count)

    def save(self, name: str) -> None:
        self.log.query(f"SAVEPOINT `{name.replace('`', '``')}`")
        self.savepoints = [each for each in self.savepoints if each[0] != name.lower()]
        self.savepoints.append((name.lower(), len(self.rows)))

    def roll_back_to(self, name: str) -> None:
        names = [each for each, _ in self.savepoints]
        if name.lower() in names:
            self.log.query(f"ROLLBACK TO `{name.replace('`', '``')}`")
            self.savepoints = self.savepoints[: names.index(name.lower()) + 1]
            del self.rows[self.savepoints[-1][1] :]

    def release(self, name: str) -> None:
        """Is in no log."""
        names = [each for each, _ in self.savepoints]
        if name.lower() in names:
            self.savepoints = self.savepoints[: names.index(name.lower())]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    for _ in range(draw(st.integers(1, 3))):
        server, xa = Server(log), draw(st.booleans())
        xid = b"x%d" % log.seq
        log.begin(PREPARED if xa else 0, 1000, xid if xa else b"")
        for _ in range(draw(st.integers(0, 12))):
            steps = {"save": server.save, "undo": server.roll_back_to, "release": server.release}
            kind = draw(st.sampled_from(["write", "write", "save", "undo", "release"]))
            if kind == "write":
                server.write(draw(st.integers(1, 3)))
            else:
                steps[kind](draw(st.sampled_from(NAMES)))
        if xa:
            log.prepared[xid] = server.rows
            log.query(f"XA END X'{xid.hex()}',X'',1")
            prepare = b"\0\x01\0\0\0" + bytes((len(xid), 0, 0, 0)) + bytes(4) + xid
            log.parts.append(event(EventType.XA_PREPARE, prepare))
            log.end()
            log.finish(1000, commit=draw(st.booleans()))
        else:
            log.parts.append(event(EventType.XID, bytes(8)))
            log.end(*((log.ts, row) for row in server.rows))
    return log


def read(
    parts: Sequence[bytes],
    borders: Sequence[int],
    *,
    held_bytes: int,
    torn: Torn,
) -> list[Item]:
    found: list[Item] = []
    with (
        TemporaryDirectory() as directory,
        closing(OpenTransactions(Path(directory) / "open", held_bytes)) as shared,
    ):
        transactions = Transactions(
            LogPosition(SavedPosition(0, "")), held_bytes=held_bytes, torn=torn, shared=shared
        )
        for begin, end in itertools.pairwise(borders):
            found += transactions.take(events(list(parts[begin:end])))
    return found


def given_rows(items: Sequence[Item]) -> list[tuple[int, object]]:
    return [
        (int(item.commit_ts[number]), item.events.body(number))
        for item in items
        if isinstance(item, Commits)
        for number in item.events.of(EventType.WRITE_ROWS_V1).tolist()
    ]


def attempt(log: Log, borders: Sequence[int], held_bytes: int, torn: Torn) -> list[Item] | None:
    """None: rows that were given are undone, which the next reading knows."""
    try:
        return read(log.parts, borders, held_bytes=held_bytes, torn=torn)
    except TornTransactionError as err:
        undone = err
    assert undone.transaction not in torn, "one reading more is enough"
    torn[undone.transaction] = undone.rows
    return None


@given(logs(), st.lists(st.integers(0, 200)), st.sampled_from([1, 200, 1 << 20]))
def test_rows_behind_the_savepoint_are_undone(log: Log, cuts: list[int], held_bytes: int) -> None:
    borders = sorted({0, len(log.parts), *(cut % (len(log.parts) + 1) for cut in cuts)})
    torn: Torn = {}
    items = None
    while items is None:
        items = attempt(log, borders, held_bytes, torn)
    assert given_rows(items) == log.wanted


def test_table_maps_stay_when_the_rows_behind_them_are_undone() -> None:
    """A trigger goes back to its savepoint in the middle of a statement,
    whose later rows have no TABLE_MAP anew.
    """
    log = Log()
    log.begin(0, 1000)
    log.query("SAVEPOINT `s`")
    log.write(1)
    log.query("ROLLBACK TO `s`")
    log.parts += [
        event(EventType.WRITE_ROWS_V1, b"of the same map"),
        event(EventType.XID, bytes(8)),
    ]
    (item,) = read(log.parts, [0, len(log.parts)], held_bytes=1 << 20, torn={})
    assert isinstance(item, Commits)
    assert len(item.events.of(EventType.TABLE_MAP)) == 1
    assert given_rows([item]) == [(log.ts, b"of the same map")]


@pytest.mark.parametrize(
    ("names", "back", "nests"),
    [
        (("s", "s"), "S", True),  # the second one may be that of a function
        (("é", "e"), "é", False),  # utf8_general_ci: the second one has replaced the first one
        (("É",), "é", False),
        (("a",), "b", False),
    ],
)
def test_what_the_log_does_not_tell_is_told(names: tuple[str, ...], back: str, nests: bool) -> None:
    log = Log()
    log.begin(0, 1000)
    for name in names:
        log.write(1)
        log.query(f"SAVEPOINT `{name}`")
    log.write(1)
    log.query(f"ROLLBACK TO `{back}`")
    log.parts.append(event(EventType.XID, bytes(8)))
    unclear = [
        item
        for item in read(log.parts, [0, len(log.parts)], held_bytes=1, torn={})
        if isinstance(item, UnclearSavepoint)
    ]
    tables = frozenset({("d", "t")})
    assert [(item.name, item.nests, item.tables) for item in unclear] == [(back, nests, tables)]


def test_an_unclear_savepoint_stops_only_whoever_has_one_of_its_tables() -> None:
    tables = Tables([])
    unclear = UnclearSavepoint(1, "s", None, "it is unclear", nests=True)
    tables.check_savepoint(unclear, nested=lambda: True)
    tables.by_name["d", "t"] = None  # type: ignore[assignment]
    tables.check_savepoint(unclear, nested=lambda: False)
    tables.check_savepoint(
        UnclearSavepoint(1, "s", frozenset({("d", "u")}), "x"), nested=lambda: True
    )
    with pytest.raises(SavepointUnclearError, match="in the transaction at 1"):
        tables.check_savepoint(unclear, nested=lambda: True)
