"""Random lives of lakes and target databases, against a replay.

    python -m tests.fuzz.lakes --target delta --mode upsert --seconds 120 [--seed N] [--others]

A life is one changefeed of a few tables with odd names, keys and values: rows that are inserted
twice, updated before they are there, changed many times in a cut; columns and tables that are
renamed, swapped, dropped and made again. The lake job's own steps apply it cut by cut, a job starts
again between cuts, and dies after what it has just made durable. At the end of cuts each table must
be what the replay has.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import random
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.format import DROP, KEEP, MODES, ROW_MODES, SOFT_DELETE
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy, widens
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.target import table_path
from pyspark_tidemark.names import check_names
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.lake.aged import AcknowledgedFeed, read_changelog
from tests.integration.lake.deaths import Deaths, Killed
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_names import NAMES
from tests.mariadb import running_mariadb
from tests.postgres import running_postgres

FILES: Final = ("delta", "iceberg", "parquet")
TARGETS: Final = (*FILES, "postgresql", "mysql")
STEPS: Final = 40
_SPECIAL: Final = (
    "add", "txn", "value", "_tmp", "file", "_op", "_seq", "source", "target", "data_file", "pos",
    "element", "key", "is_current", "valid_from_ts", "partition", "version", "__old", "_commit_ts",
    "is_deleted", "_first_op", "_last", "_file", "_sequence", "_deleted", "_ends", "_row", "_first", "s", "t",
)  # fmt: skip
_TEXTS: Final = (
    *("", " ", "  ", "a", "A", "a ", " a", "ä", "a\u0308", "Ä", "ß", "ss", "😀", "a😀", "\u200b"),
    *("'", '"', "''", "\\", "\\'", "\\\\", "\\N", "\\.", "NULL", "null", ",", ";", "%", "_", "%s"),
    *("a\nb", "\r\n", "\r", "\t", "{}", "{0}", "$1", "?", ":x", "--", "/*", "x" * 200, "\x7f"),
    *("1", "01", "1.0", "-0", "true", "\ufeff", "\ufffd", "\u2028", "\x01", "\x1a", "\x85"),
)
_BYTES: Final = (
    *(b"", b"\0", b"\0\0", b"a", b"A", b"a\0", b"\xff", b"\xff\xff", b"\\", b"\\x00", b"\\N"),
    *(b"'", b"\n", b"\r\n", b"\x1a", b"a ", b"a", b"\x80", b"\xc3\x28", bytes(range(256))),
)
_MOMENTS: Final = (
    datetime.min,  # noqa: DTZ901
    datetime(1, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001 - DATETIMEs have no zone
    datetime(999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    datetime(1582, 10, 10),  # noqa: DTZ001
    datetime(1883, 11, 18, 12, 3, 57),  # noqa: DTZ001
    datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    datetime(1970, 1, 1),  # noqa: DTZ001
    datetime(2024, 3, 31, 2, 30),  # noqa: DTZ001
    datetime(2024, 10, 27, 2, 30, 0, 5),  # noqa: DTZ001
    datetime.max,  # noqa: DTZ901
)
_POOLS: Final[dict[Any, tuple[Any, ...]]] = {
    pa.int8(): (-128, -1, 0, 1, 127),
    pa.int16(): (-(1 << 15), -1, 0, 1, 255, (1 << 15) - 1),
    pa.int32(): (-(1 << 31), -1, 0, 1, 65536, (1 << 31) - 1),
    pa.int64(): (-(1 << 63), -1, 0, 1, 1 << 53, (1 << 53) + 1, (1 << 63) - 1),
    pa.decimal128(10, 2): tuple(map(Decimal, ("-99999999.99", "-0.01", "0.00", "1.50", "1.00"))),
    pa.decimal128(20, 0): (Decimal(0), Decimal(1), Decimal((1 << 64) - 1)),
    pa.decimal128(38, 30): (Decimal("0.5").scaleb(-29), Decimal("99999999.5"), Decimal("-1E-30")),
    pa.float32(): (0.0, 1.5, -0.25, 65536.0),
    pa.float64(): (0.0, 0.1, -1.5, 5e-324, 1.7976931348623157e308, 1e-300, 9007199254740993.0),
    pa.string(): _TEXTS,
    pa.binary(): _BYTES,
    pa.date32(): (date.min, date(1582, 10, 10), date(1969, 12, 31), date(2024, 2, 29), date.max),
    pa.timestamp("us"): _MOMENTS,
    pa.timestamp("us", tz="UTC"): (
        *(each.replace(tzinfo=UTC) for each in _MOMENTS[7:-1]),
        datetime(2038, 1, 19, 3, 14, 7, 999999, UTC),
    ),
}  # fmt: skip
_WIDENING: Final = (
    *itertools.pairwise((pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    (pa.decimal128(10, 2), pa.decimal128(18, 2)),
    (pa.float32(), pa.float64()),
)
_POOLS[pa.decimal128(18, 2)] = _POOLS[pa.decimal128(10, 2)]
_DELTA_PROPERTIES: Final = (
    ("'comment'", "ours"),
    ("delta.checkpointInterval", "3"),
    ("delta.enableChangeDataFeed", "true"),
    ("delta.enableRowTracking", "true"),
    ("delta.enableInCommitTimestamps", "true"),
    ("delta.checkpointPolicy", "v2"),
    ("delta.dataSkippingNumIndexedCols", "1"),
    ("delta.enableDeletionVectors", "false"),
    ("delta.logRetentionDuration", "interval 0 seconds"),
    ("delta.setTransactionRetentionDuration", "interval 1 milliseconds"),
    ("delta.columnMapping.mode", "name"),
    ("delta.randomizeFilePrefixes", "true"),
)
"""What people set on a table of Delta; each asks something else of whoever writes to it."""
_NOT_KEYS: Final = {pa.float32(), pa.float64()}


class WrongError(AssertionError):
    """A target has other rows than the replay; or a life could not go on."""


class FullError(Exception):
    """A job ended on a disk without room."""


@dataclasses.dataclass(frozen=True)
class SmallDisk:
    """A file system of some MiB over a directory; root only."""

    directory: Path
    mib: int = 200

    def __post_init__(self) -> None:
        self.directory.mkdir()
        size = f"size={self.mib}m"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.directory)], check=True
        )

    @property
    def _ballast(self) -> Path:
        return self.directory / "ballast"

    def fill(self, room_bytes: int) -> None:
        """Leave so much room."""
        free = os.statvfs(self.directory)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - room_bytes))

    def free(self) -> None:
        """End `fill`."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "--lazy", str(self.directory)], check=True)


class RandomDeaths(Deaths):
    """Kills after a random one of the next durable steps."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self._left = 0

    def arm(self) -> None:
        """One death in so many steps."""
        self._left, self.armed = self._dice.choice((1, 2, 3, 5, 8, 13)), True

    def after(self, what: str) -> None:
        del what
        if self.armed:
            self._left -= 1
            if not self._left:
                self.armed = False
                raise Killed


class OddFeed(AcknowledgedFeed):
    """Takes changes as they are told, whether or not they fit what is there."""

    def __init__(self, *, keeps_deleted: bool = False) -> None:
        super().__init__()
        self._keeps_deleted = keeps_deleted

    def tell(self, ts: int, name: str, op: str, seq: int, row: dict[str, Any]) -> None:
        """One change."""
        self._change(name, op, ts, seq, row)
        held, key = self._state(ts)[name], next(iter(row.values()))
        if self._keeps_deleted:
            held[key] = row | {"_commit_ts": ts, "is_deleted": op == "delete"}
        elif op == "delete":
            held.pop(key, None)
        else:
            held[key] = row | {"_commit_ts": ts}

    def truncate(self, ts: int, name: str) -> None:
        """TRUNCATE TABLE, after which rows that are kept are all deleted."""
        held = self._state(ts)[name]
        super().truncate(ts, name)
        if self._keeps_deleted:
            self._state(ts)[name] = {
                key: row if row["is_deleted"] else row | {"_commit_ts": ts, "is_deleted": True}
                for key, row in held.items()
            }

    def reread(self, ts: int, name: str, column: str, new: tuple[str, Any]) -> None:
        """A column gets another name and type: the table is emptied, and comes again."""
        columns = dict(new if each[0] == column else each for each in self.columns(name).items())
        renamed = {} if new[0] == column else {column: new[0]}
        self.alter(ts, name, "ALTER TABLE … CHANGE", renamed, None, (), **columns)
        self.ddls[-1] = dataclasses.replace(self.ddls[-1], truncated=(name,))
        self._state(ts)[name] = {}

    def columns(self, name: str) -> dict[str, Any]:
        """Those of the table now."""
        return dict(next(v for v in reversed(self.versions) if v.name == name).columns)


class Life:
    """One changefeed and its target, made by one seed."""

    def __init__(
        self, seed: int, place: "Place", mode: str, told: Counter[str], *, others: bool = False
    ) -> None:
        """With `others`, somebody else maintains the lake's tables, too."""
        self.dice = random.Random(seed)
        self.others = others
        self.place, self.mode, self.told = place, mode, told
        self.feed = OddFeed(keeps_deleted=mode == SOFT_DELETE)
        self.ts, self.kept_ts = 0, 0
        self.policy = Policy(mode, on_drop=self.dice.choice((KEEP, DROP)))
        self.deaths = RandomDeaths(self.dice)
        self.names = [name for name in (*NAMES, *_SPECIAL) if place.holds_column(name)]
        self.tables = [name for name in (*NAMES, *_SPECIAL) if place.holds_table(name)]
        self.can_rename = place.kind != "iceberg"

    def run(self) -> None:
        """Raises WrongError, SourceError."""
        for _ in range(self.dice.randint(1, 3)):
            self._create(0)
        with self.deaths.planned():
            for _ in range(STEPS):
                self._step()
            self._keep(self.ts)
            self._compare()

    def _step(self) -> None:
        dice = self.dice.random()
        if dice < 0.45:
            self._write()
        elif dice < 0.7:
            self._alter()
        elif dice < 0.8:
            self._table_ddl()
        else:
            self._keep(self.dice.randint(self.kept_ts, self.ts))
            if self.others and self.dice.random() < 0.8:
                self._maintained_by_others()
            if self.dice.random() < 0.5:
                self._compare()

    # Rows

    def _write(self) -> None:
        live = list(self.feed.state(self.ts))
        for name in self.dice.sample(live, self.dice.randint(0, len(live))):
            for _ in range(self.dice.choice((1, 1, 3))):
                self.ts += 1
                self._transaction(name)
        self.ts += self.dice.choice((0, 1, 7))

    def _transaction(self, name: str) -> None:
        """A change a key: deletes first, as the capture tells them, then inserts and updates."""
        columns = self.feed.columns(name)
        held = self.feed.state(self.ts).get(name, {})
        key_name = next(iter(columns))
        pool = [self.value(columns[key_name], is_key=True) for _ in range(12)]
        keys = list(dict.fromkeys([*pool, *held]))
        chosen = self.dice.sample(keys, min(len(keys), self.dice.choice((1, 2, 5, 9))))
        seq = itertools.count()
        gone = [key for key in chosen if self.dice.random() < 0.35]
        for key in gone:
            row = held.get(key) or {key_name: key} | self._values(columns)
            row = {column: row[column] for column in columns}
            self.feed.tell(self.ts, name, "delete", next(seq), row)
        for key in chosen:
            if key in gone and self.dice.random() < 0.5:
                continue
            row = {key_name: key} | self._values(columns)
            row_there = self.feed.state(self.ts).get(name, {}).get(key)
            there = row_there is not None and not row_there.get("is_deleted")
            honest = self.mode not in ROW_MODES or self.dice.random() < 0.8
            op = (
                ("update" if there else "insert")
                if honest
                else self.dice.choice(("insert", "update"))
            )
            self.feed.tell(self.ts, name, op, next(seq), row)
        self.told["rows"] += len(chosen)

    def _values(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {name: self.value(kind) for name, kind in list(columns.items())[1:]}

    def value(self, kind: Any, *, is_key: bool = False) -> Any:
        """One of a type, or null."""
        if not is_key and self.dice.random() < 0.15:
            return None
        return self.dice.choice(_POOLS[kind])

    # Columns

    def _alter(self) -> None:
        live = list(self.feed.state(self.ts))
        if not live:
            return
        name = self.dice.choice(live)
        columns = self.feed.columns(name)
        others = list(columns)[1:]
        kinds = ["add", "add default", "case", "rename key", "rename"]
        if others:
            kinds += ["drop", "again", "rename", "move", "widen", "retype"]
        if len(others) > 1:
            kinds += ["swap", "shift", "several"]
        kind = self.dice.choice(kinds)
        if kind == "retype" and self.mode != "upsert":
            kind = "add"  # a history cannot follow that
        self.told[f"ALTER {kind}"] += 1
        self.ts += 1
        if kind == "retype":
            self._read_again(name, columns)
            return
        altered = Altered(self, list(columns.items()))
        altered.make(kind)
        self.feed.alter(
            self.ts,
            name,
            f"ALTER TABLE … {kind}",
            altered.renamed,
            altered.defaults,
            tuple(altered.dropped),
            **dict(altered.columns),
        )
        self.ts += self.dice.choice((0, 1))

    def _read_again(self, name: str, columns: dict[str, Any]) -> None:
        """A column, now and then of the key, gets another type, and perhaps another name."""
        column = self.dice.choice(list(columns))
        is_key = column == next(iter(columns))
        new_name = self.fresh(columns) if self.dice.random() < 0.3 else column
        kind = self.kind(is_key=is_key)
        held = list(self.feed.state(self.ts)[name].values())
        self.feed.reread(self.ts, name, column, (new_name, kind))
        self.ts += 1
        keys = self.dice.sample(_POOLS[kind], len(_POOLS[kind])) if is_key else held
        for seq, (row, key) in enumerate(zip(held, keys, strict=False)):
            value = key if is_key else self.value(kind)
            again = {new_name if c == column else c: row[c] for c in columns} | {new_name: value}
            self.feed.tell(self.ts, name, "update", seq, again)

    def fresh(self, taken: Iterable[str]) -> str:
        """A column's name that is none of those."""
        used = {name.lower() for name in taken}
        return self.dice.choice([name for name in self.names if name.lower() not in used])

    def kind(self, *, is_key: bool = False) -> Any:
        """A column's type."""
        return self.dice.choice([kind for kind in _POOLS if not (is_key and kind in _NOT_KEYS)])

    # Tables

    def _table_ddl(self) -> None:
        live = list(self.feed.state(self.ts))
        kinds = ["create"]
        if live:
            kinds += ["drop", "truncate", "replace", "again"]
        if live and self.can_rename:
            kinds += ["rename", "rename"]
        if len(live) > 1 and self.can_rename:
            kinds += ["swap", "chain"]
        kind = self.dice.choice(kinds)
        self.told[kind] += 1
        self.ts += 1
        one, *others = self.dice.sample(live, len(live)) if live else [""]
        if kind == "create":
            self._create(self.ts)
        elif kind == "drop":
            self.feed.drop(self.ts, one)
        elif kind == "again":
            self.feed.drop(self.ts, one)
            for _ in range(self.dice.choice((0, 0, 2))):
                self.ts += 1
                self._create(self.ts, one)
                self._maybe_filled(one)
                self.ts += 1
                self.feed.drop(self.ts, one)
            self.ts += 1
            self._create(self.ts, one)
        elif kind == "truncate":
            self.feed.truncate(self.ts, one)
        elif kind == "replace":
            self.feed.create_or_replace(self.ts, one, **self._columns())
        elif kind == "rename":
            self.feed.rename(self.ts, one, self._free_table())
        elif kind == "swap":
            self.feed.rename_all(self.ts, (one, others[0]), (others[0], one))
        else:
            self.feed.rename_all(self.ts, (one, others[0]), (others[0], self._free_table()))
        self.ts += self.dice.choice((0, 1))

    def _maybe_filled(self, name: str) -> None:
        if self.dice.random() < 0.6:
            self.ts += 1
            self._transaction(name)

    def _create(self, ts: int, name: str = "") -> None:
        name = name or self._free_table()
        self.feed.create(ts, name, **self._columns())

    def _columns(self) -> dict[str, Any]:
        found: list[tuple[str, Any]] = []
        for place in range(self.dice.choice((1, 2, 3, 5, 9))):
            name = self.fresh(each for each, _ in found)
            found.append((name, self.kind(is_key=place == 0)))
        return dict(found)

    def _free_table(self) -> str:
        """A name that no table has; one that an earlier table had now and then."""
        live = {name.lower() for name in self.feed.state(self.ts)}
        ever = sorted({version.name for version in self.feed.versions})
        free = [name for name in ever if name.lower() not in live]
        if free and self.dice.random() < 0.5 and self.policy.on_drop == DROP:
            return self.dice.choice(free)
        taken = {name.lower() for name in ever}
        names = [
            f"{schema}.{name}"
            for schema in ("bank", "Größe")
            for name in self.tables
            if f"{schema}.{name}".lower() not in taken
        ]
        # Servers on Linux tell names by their case, and so do directories and these databases.
        cased = [name.partition(".")[2].swapcase() for name in ever]
        names += [
            f"bank.{name}"
            for name in cased
            if f"bank.{name}" not in ever and self.place.holds_table(name)
        ]
        return self.dice.choice(names)

    # The lake job

    def _keep(self, end_ts: int) -> None:
        wanted = [
            self.dice.randint(self.kept_ts, end_ts) for _ in range(self.dice.choice((0, 1, 3)))
        ]
        ends = [ts for ts in self.feed.cut_ends(*wanted, end_ts) if self.kept_ts < ts <= end_ts]
        by_tasks = self.place.kind in ("delta", "iceberg") and self.dice.random() < 0.15
        while ends:
            if self.dice.random() < 0.5:
                self.deaths.arm()
            small = (
                patch.object(changes, "ARROW_READ_MAX_BYTES", -1)
                if by_tasks
                else contextlib.nullcontext()
            )
            try:
                with small, self._nearly_full():
                    self._job(ends)
            except FullError:
                self.told["disk full"] += 1
                continue
            except Killed:
                self.told["deaths"] += 1
                continue
            finally:
                self.deaths.armed = False
            break
        self.kept_ts = max(self.kept_ts, end_ts)

    @contextlib.contextmanager
    def _nearly_full(self) -> Iterator[None]:
        """Now and then a disk that has little room left, on which anything may fail.

        Raises:
            FullError: something did.
        """
        if self.place.disk is None or self.dice.random() < 0.6:
            yield
            return
        self.place.disk.fill(self.dice.choice((0, 4, 16, 64, 200)) << 10)
        try:
            yield
        except Exception as err:
            raise FullError from err
        finally:
            self.place.disk.free()

    def _job(self, ends: list[int]) -> None:
        with self.place.manifest() as manifest:
            target = self.place.target(self.mode, self.dice)
            cuts = CutApplier(
                cast("Any", self.feed),
                "fuzz",
                target,
                manifest,
                policy=self.policy,
                writers=TableWriters(source_options={}, spark=self.place.spark, parallel=1),
            )
            for end_ts in ends:
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                if end_ts > start_ts:
                    cuts.apply(Cut(0, start_ts, end_ts))
                    if self.dice.random() < 0.8:
                        cuts.acknowledge()
                    if self.dice.random() < 0.3:
                        target.maintain(KeptCuts(manifest, 24.0))
                    self.told["cuts"] += 1
            cuts.acknowledge()
            self.deaths.armed = False
            target.close()

    def _maintained_by_others(self) -> None:
        """What people run on tables that they did not write, between two cuts."""
        names = [name for name in self.feed.state(self.kept_ts) if self.place.has(name)]
        if names:
            self.told[f"others {self.place.maintained(self.dice.choice(names), self.dice)}"] += 1

    def _compare(self) -> None:
        ts = self.kept_ts
        if not ts or any(ddl.ts == ts for ddl in self.feed.ddls):
            return  # that cut is on the DDL's near side
        for name, held in self.feed.state(ts).items():
            self._compare_table(name, held, ts)
        self.told["compared"] += 1

    def _compare_table(self, name: str, held: dict[Any, Any], ts: int) -> None:
        key = self.feed.describe(ts).tables[name].key[0]
        found = self.place.rows(name, ts)
        if self.mode == "append":
            self._compare_changes(name, found, ts)
            return
        if self.mode == "scd2":
            current = [row for row in found if row["is_current"]]
            found = [
                {
                    c: v
                    for c, v in row.items()
                    if c not in ("valid_from_ts", "valid_to_ts", "is_current")
                }
                | {"_commit_ts": row["valid_from_ts"]}
                for row in current
            ]
        by_key = {_plain(row[key]): _plain_row(row) for row in found}
        wanted = {_plain(k): _plain_row(row) for k, row in held.items()}
        if len(by_key) != len(found) or by_key != wanted:
            raise WrongError(
                f"{name} at {ts}: {len(found)} rows, {len(wanted)} wanted; "
                f"missing {[k for k in wanted if k not in by_key][:3]}, "
                f"surplus {[k for k in by_key if k not in wanted][:3]}, other "
                f"{[(by_key[k], wanted[k]) for k in wanted if k in by_key and by_key[k] != wanted[k]][:1]}"
            )

    def _compare_changes(self, name: str, found: list[dict[str, Any]], ts: int) -> None:
        wanted = {(r["_commit_ts"], r["_seq"]): r for r in self.feed.history(name, ts)}
        by_change = {
            (r["_commit_ts"], r["_seq"]): r
            for r in found
            if self.place.kind == "parquet" or r["_commit_ts"] > self._began_ts(name, ts)
        }
        if by_change.keys() != wanted.keys():
            raise WrongError(f"{name} at {ts}: {by_change.keys() ^ wanted.keys()} changes differ")
        for at, row in by_change.items():
            columns = wanted[at].keys() if self.place.kind == "parquet" else ()
            if {c: _plain(row.get(c)) for c in columns} != _plain_row(
                {c: wanted[at][c] for c in columns}
            ):
                raise WrongError(f"{name} at {ts}: {at}: {row}, not {wanted[at]}")

    def _began_ts(self, name: str, ts: int) -> int:
        table_id = self.feed._version(name, ts).table_id
        return min(v.from_ts for v in self.feed.versions if v.table_id == table_id)


class Altered:
    """The columns of a table after an ALTER, and what became of those before; the first is the
    key.
    """

    def __init__(self, life: Life, columns: list[tuple[str, Any]]) -> None:
        self.life, self.dice, self.columns = life, life.dice, columns
        self.renamed: dict[str, str] = {}
        self.defaults: dict[str, Any] = {}
        self.dropped: list[str] = []

    def make(self, kind: str) -> None:
        """One change, or several."""
        if kind == "several":
            for each in self.dice.sample(("add default", "rename", "widen", "drop"), 3):
                self.make(each)
            return
        steps: dict[str, Callable[[], None]] = {
            "add": self._add,
            "add default": lambda: self._add(filled=True),
            "rename": lambda: self._rename(self._place()),
            "rename key": lambda: self._rename(0),
            "case": lambda: self._rename(self._place(), case=True),
            "drop": self._drop,
            "again": self._again,
            "move": self._move,
            "widen": self._widen,
            "swap": self._swap,
            "shift": lambda: self._swap(back=False),
        }
        steps[kind]()

    def _place(self) -> int:
        """Of a column that is not the key, if there is one."""
        return self.dice.randint(1, len(self.columns) - 1) if len(self.columns) > 1 else 0

    def _taken(self) -> list[str]:
        return [*(name for name, _ in self.columns), *self.renamed, *self.dropped]

    def _is_touched(self, name: str) -> bool:
        return name in (*self.renamed.values(), *self.defaults)

    def _add(self, *, filled: bool = False) -> None:
        name, kind = self.life.fresh(self._taken()), self.life.kind()
        self.columns.insert(self.dice.randint(1, len(self.columns)), (name, kind))
        if filled:
            self.defaults[name] = self.life.value(kind, is_key=True)

    def _rename(self, place: int, *, case: bool = False) -> None:
        old, kind = self.columns[place]
        new = old.swapcase() if case else self.life.fresh(self._taken())
        others = {name.lower() for name in self._taken() if name != old}
        holds = self.life.place.holds_column(new)
        if new != old and new.lower() not in others and holds and not self._is_touched(old):
            self.renamed[old] = new
            self.columns[place] = (new, kind)

    def _drop(self) -> None:
        place = self._place()
        if place and not self._is_touched(self.columns[place][0]):
            self.dropped.append(self.columns.pop(place)[0])

    def _again(self) -> None:
        place, kind = self._place(), self.life.kind()
        name = self.columns[place][0]
        self.dropped.append(name)
        self.columns[place] = (name, kind)
        self.defaults[name] = self.life.value(kind, is_key=True)

    def _move(self) -> None:
        rest = self.columns[1:]
        self.dice.shuffle(rest)
        self.columns[1:] = rest

    def _widen(self) -> None:
        for place, (name, kind) in enumerate(self.columns):
            wider = dict(_WIDENING).get(kind)
            if wider is not None and name not in self.defaults and self.dice.random() < 0.7:
                assert widens(kind, wider)
                self.columns[place] = (name, wider)

    def _swap(self, *, back: bool = True) -> None:
        one, two = self.dice.sample(range(1, len(self.columns)), 2)
        (a, kind_a), (b, kind_b) = self.columns[one], self.columns[two]
        last = a if back else self.life.fresh(self._taken())
        self.renamed |= {a: b, b: last}
        self.columns[one], self.columns[two] = (b, kind_a), (last, kind_b)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


@dataclasses.dataclass
class Place:
    """Where a life's target is."""

    kind: str
    uri: str
    spark: Any = None
    disk: SmallDisk | None = None

    @property
    def path(self) -> str:
        return self.uri.partition("://")[2]

    def holds_column(self, name: str) -> bool:
        with contextlib.suppress(SourceError):
            check_names(self.kind, ("bank", "t"), [name])
            return name.lower() not in {"_op", "_commit_ts", "_start_ts", "_seq"} | {
                "valid_from_ts", "valid_to_ts", "is_current", "is_deleted"}  # fmt: skip
        return False

    def holds_table(self, name: str) -> bool:
        with contextlib.suppress(SourceError):
            check_names(self.kind, ("bank", name), ["c"])
            return len(name) < 60 and "." not in name
        return False

    def manifest(self) -> Any:
        if self.kind in FILES:
            return FileManifest.opened(self.path, "fuzz")
        return DatabaseManifest.opened(database_of(SinkUri.parse(self.uri)), "fuzz")

    def target(self, mode: str, dice: random.Random) -> Any:
        if self.kind == "parquet":
            return ChangelogTarget(self.spark, self.path)
        if self.kind not in FILES:
            return DatabaseTarget(database_of(SinkUri.parse(self.uri)), "fuzz", mode=mode)
        made = {"delta": DeltaTarget, "iceberg": IcebergTarget}[self.kind]
        if self.kind == "delta":
            self.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        return cast("Any", made)(
            self.spark,
            self.path,
            "fuzz",
            mode=mode,
            compact_every=dice.choice((0, 3, 64)),
            deletion_vectors=dice.choice((True, True, False)),
        )

    def has(self, name: str) -> bool:
        """Whether a table of files is there."""
        return self.kind in ("delta", "iceberg") and Path(table_path(self.path, name)).exists()

    def maintained(self, name: str, dice: random.Random) -> str:
        """Maintain a table as somebody else would; returns by what."""
        if self.kind == "iceberg":
            return _maintained_iceberg(self.spark, table_path(self.path, name), dice)
        table = f"delta.`{table_path(self.path, name).replace('`', '``')}`"
        columns = self.spark.sql(f"SELECT * FROM {table} LIMIT 0").columns
        column = "`" + dice.choice(columns).replace("`", "``") + "`"
        statement = dice.choice(
            (
                *(f"OPTIMIZE {table}", f"OPTIMIZE {table} ZORDER BY ({column})"),
                f"VACUUM {table} RETAIN 0 HOURS",
                f"REORG TABLE {table} APPLY (PURGE)",
                f"ALTER TABLE {table} CLUSTER BY ({column})",
                f"ALTER TABLE {table} ADD CONSTRAINT ours CHECK (1 = 1)",
                *(
                    f"ALTER TABLE {table} SET TBLPROPERTIES ({name} = '{value}')"
                    for name, value in _DELTA_PROPERTIES
                ),
            )
        )
        self.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        shown = statement.replace(table, "…")
        try:
            self.spark.sql(statement)
        except AnalysisException as err:
            # As by a column that has no bounds, or a table that is partitioned otherwise.
            return f"{shown}: {err.getCondition()}"
        return shown

    def rows(self, name: str, ts: int) -> list[dict[str, Any]]:
        if self.kind == "parquet":
            return read_changelog(Path(self.path), name, ts)
        if self.kind in FILES:
            frame = as_of_cut(self.spark, self.uri, ts)[name]
            return cast("list[dict[str, Any]]", frame.toArrow().to_pylist())
        return cast("list[dict[str, Any]]", rows(self.uri, name))


_ICEBERG_PROPERTIES: Final = {
    "commit.manifest.min-count-to-merge": "3",
    "write.metadata.compression-codec": "gzip",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "1",
    "write.format.default": "avro",
    "write.parquet.compression-codec": "snappy",
    "write.delete.mode": "copy-on-write",
    "write.object-storage.enabled": "true",
    "history.expire.max-snapshot-age-ms": "1",
    "write.metadata.metrics.default": "none",
    "commit.retry.num-retries": "0",
}
_ICEBERG_WAYS: Final = (
    *_ICEBERG_PROPERTIES,
    *("expire_snapshots", "rewrite_manifests", "append nothing"),
    *("remove_orphan_files", "tag", "branch", "partition", "order"),
)


def _maintained_iceberg(spark: Any, path: str, dice: random.Random) -> str:
    """By Iceberg's own library, as its procedures for engines do."""
    java = spark._jvm
    tables = java.org.apache.iceberg.hadoop.HadoopTables(spark._jsc.hadoopConfiguration())
    table = tables.load(path)
    if table.currentSnapshot() is None:
        return "nothing"
    way = dice.choice(_ICEBERG_WAYS)
    if way in _ICEBERG_PROPERTIES:
        table.updateProperties().set(way, _ICEBERG_PROPERTIES[way]).commit()
    elif way == "remove_orphan_files":
        actions = java.org.apache.iceberg.spark.actions.SparkActions.get(spark._jsparkSession)
        actions.deleteOrphanFiles(table).olderThan(int(time.time() * 1000)).execute()
    elif way == "tag":
        snapshot_id = table.currentSnapshot().snapshotId()
        table.manageSnapshots().createTag(f"t{snapshot_id}", snapshot_id).commit()
    elif way == "branch":
        table.manageSnapshots().createBranch(f"b{dice.random()}").commit()
    elif way == "partition":
        spec = table.updateSpec()
        bucket = java.org.apache.iceberg.expressions.Expressions.bucket
        column = dice.choice(list(table.schema().columns())).name()
        spec.addField(f"bucket_{dice.random()}", bucket(column, 4)).commit()
    elif way == "order":
        column = dice.choice(list(table.schema().columns())).name()
        table.replaceSortOrder().asc(column).commit()
    elif way == "expire_snapshots":
        now_ms = int(time.time() * 1000)
        table.expireSnapshots().expireOlderThan(now_ms).retainLast(1).commit()
    elif way == "rewrite_manifests":
        same = java.java.util.function.Function.identity()
        table.rewriteManifests().clusterBy(same).commit()
    else:
        table.newAppend().commit()
    return str(way)


@contextlib.contextmanager
def places(kind: str, *, full: bool = False) -> Iterator[Callable[[int], Place]]:
    """Makes an empty place for each life."""
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            server = stack.enter_context(running_postgres())
            yield lambda number: Place(kind, server.create(f"lake{number}"))
            return
        if kind == "mysql":
            mariadb = stack.enter_context(running_mariadb())

            def fresh(number: int) -> Place:
                for name in ("bank", "Größe"):
                    mariadb.execute(f"DROP DATABASE IF EXISTS `{name}`")
                return Place(kind, f"{mariadb.uri}/{mariadb.database(f'lake{number}')}")

            yield fresh
            return
        os.environ["TZ"] = "UTC"
        time.tzset()
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tm-lakes-"))
        spark = open_session(
            master="local[2]", driver_memory="1g", directory=Path(root), lake="delta", extra={}
        )
        stack.callback(spark.stop)
        if not full:
            yield lambda number: Place(kind, f"{kind}://{root}/lake{number}", spark)
            return
        disk = SmallDisk(Path(root, "disk"))
        stack.callback(disk.close)
        yield lambda number: Place(kind, f"{kind}://{disk.directory}/lake{number}", spark, disk)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, default="delta")
    parser.add_argument("--mode", choices=MODES, default="upsert")
    parser.add_argument(
        "--others", action="store_true", help="somebody else maintains the tables between cuts"
    )
    parser.add_argument(
        "--full", action="store_true", help="the disk is full now and then (files; root only)"
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    first = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    print(f"first seed {first}", flush=True)
    told: Counter[str] = Counter()
    deadline = time.monotonic() + arguments.seconds
    with places(arguments.target, full=arguments.full) as made:
        for seed in itertools.count(first):
            try:
                Life(seed, made(seed), arguments.mode, told, others=arguments.others).run()
                told["lives"] += 1
            except (WrongError, SourceError) as err:
                told["FAILED"] += 1
                print(f"seed {seed}: {type(err).__name__} {str(err)[:1500]}", flush=True)
            except Exception:  # noqa: BLE001 - whatever it is, the next life begins
                told["BROKEN"] += 1
                print(f"seed {seed}: {traceback.format_exc()[-3000:]}", flush=True)
            if time.monotonic() > deadline:
                break
    print(dict(told), flush=True)


if __name__ == "__main__":
    main()
