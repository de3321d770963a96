"""A database whose tables change by random DDLs, as a source reports them,
and metadata whose writer may die.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from server.capture.catalog import FeedCatalog
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.records import SchemaRecords, head_put
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from storage.meta.meta import Delete, KeyValue, Put
from storage.model.errors import UnavailableError
from storage.model.span import Span

START = 100
NAMES = ("a", "b", "c", "tmp_d")
FEED = "feed"


@dataclass(frozen=True)
class Mounter:
    name: str
    columns: int


def record(name: str, number: int, columns: int = 1, **members: Any) -> TableRecord:
    return TableRecord("s", {"id": number, "name": name, "columns": columns} | members)


class FakeSource:
    """Reads the records of `record`."""

    keeps_history = False
    warnings: tuple[str, ...] = ()
    per_table = False

    def __init__(self, records=()):
        self.records = list(records)

    async def check_start(self, ts):
        pass

    async def snapshot(self, ts, before=()):
        return self.records

    def table(self, table, before=None):
        info = table.table_info
        if info.get("keyless"):
            raise TableIneligibleError(f"{table.name} has no key")
        return SourceTable(
            table, Span(info["id"], b"%d" % info["id"], b""), Mounter(table.name, info["columns"])
        )


class SplittableSource(FakeSource):
    """Its tables can be split; the keys of one are its id and what follows."""

    per_table = True

    def __init__(self, records=()):
        super().__init__(records)
        self.begins: list[bytes] = []
        """Where regions begin."""

    def can_split(self, table):
        return True

    async def regions(self, start_key, end_key):
        return [key for key in sorted(self.begins) if key > start_key]

    def part(self, table, span):
        info = table.record.table_info
        keys = [span.start_key.hex(), span.end_key.hex()]
        name = f"{table.record.table_name}#{'-'.join(keys)}"
        return self.table(TableRecord("s", {**info, "name": name, "part": keys}))

    def table(self, table, before=None):
        whole, keys = super().table(table, before), table.table_info.get("part")
        if keys is None:
            # As TiDB's: no table's keys lie among another one's.
            start_key = b"t%010d" % whole.span.table_id
            keys = (start_key.hex(), (start_key + b"\xff").hex())
        return replace(whole, span=Span(whole.span.table_id, *map(bytes.fromhex, keys)))


@dataclass
class Database:
    """`tables` by name; `changes` are those that a log of it tells."""

    tables: dict[str, TableRecord] = field(
        default_factory=lambda: {"a": record("a", 1), "b": record("b", 2)}
    )
    changes: list[TableChange] = field(default_factory=list)
    ts: int = START
    ids: int = 2

    def carry_out(self, kind: str, name: str, other: str) -> None:
        table, target = self.tables.get(name), self.tables.get(other)
        if kind == "create" and table is None:
            self.ids += 1
            self._take((record(name, self.ids),))
        elif kind == "alter" and table is not None:
            self._take((record(name, table.table_info["id"], table.table_info["columns"] + 1),))
        elif kind == "drop" and table is not None:
            self._take((), (f"s.{name}",))
        elif kind == "truncate" and table is not None:
            self.ids += 1
            self._take((record(name, self.ids, table.table_info["columns"]),), (), (f"s.{name}",))
        elif kind == "rename" and table is not None and target is None:
            info = table.table_info
            self._take((record(other, info["id"], info["columns"]),), (f"s.{name}",))
        elif kind == "swap" and table is not None and target is not None and name != other:
            pairs = ((other, table.table_info), (name, target.table_info))
            self._take(tuple(record(each, info["id"], info["columns"]) for each, info in pairs))

    def _take(self, tables=(), dropped=(), truncated=()) -> None:
        self.ts += 10
        for name in dropped:
            del self.tables[name.removeprefix("s.")]
        self.tables |= {table.table_name: table for table in tables}
        read = tuple(map(FakeSource().table, tables))
        self.changes.append(TableChange(self.ts, f"ddl {self.ts}", read, dropped, truncated))


STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from(["create", "alter", "drop", "truncate", "rename", "swap"]),
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
    ),
    max_size=12,
)


def evolved(statements) -> Database:
    """A database after some statements; those that do not apply are left out."""
    database = Database()
    for statement in statements:
        database.carry_out(*statement)
    return database


class Metadata:
    """Keys in memory; the writer dies after `writes_left` transactions."""

    def __init__(self) -> None:
        self.pairs: dict[bytes, bytes] = {}
        self.writes_left = -1
        self.records = SchemaRecords(self, self.write)

    async def get_prefix(self, prefix):
        return [
            KeyValue(key, self.pairs[key], 1, 1, 1)
            for key in sorted(self.pairs)
            if key.startswith(prefix)
        ]

    async def write(self, ops):
        assert 0 < len(ops) <= 128
        if self.writes_left == 0:
            raise UnavailableError("the writer has died")
        self.writes_left -= 1
        for op in ops:
            if isinstance(op, Put):
                self.pairs[op.key] = op.value
            elif isinstance(op, Delete):
                end = op.range_end or op.key + b"\0"
                self.pairs = {
                    key: value for key, value in self.pairs.items() if not op.key <= key < end
                }

    async def begin(self, database: Database) -> None:
        """What the creation of a changefeed writes."""
        taken = tuple(
            table for table in database.tables.values() if not table.table_name.startswith("tmp_")
        )
        start = SchemaChange(START, tables=taken)
        await self.records.write_tables(FEED, start)
        await self.write([head_put(FEED, start)])

    async def catalog(self, checkpoint_ts: int, rules=("s.*", "!s.tmp_*")) -> FeedCatalog:
        """As a new owner reads it."""
        history = History(await self.records.load(FEED))

        async def save(change: SchemaChange) -> None:
            await self.records.append(FEED, change)

        return FeedCatalog(
            Terms(FEED, TableFilter(rules)), FakeSource(), history, checkpoint_ts, save
        )


def seen(catalog: FeedCatalog, first_ts: int, last_ts: int) -> list[object]:
    """All that readers can learn of a catalog at and above `first_ts`."""
    by_ts = [
        sorted(
            (table.name, table.span.table_id, table.mounter.columns, version.from_ts)
            for table, version in pairs
        )
        for ts in range(first_ts, last_ts + 11, 10)
        for pairs in [[(catalog.of(version), version) for version in catalog.versions.at(ts)]]
    ]
    return [by_ts, catalog.versions.ddls(first_ts + 1), catalog.versions.next_change(first_ts)]
