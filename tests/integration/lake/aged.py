"""A long history for lakes that grow old: 300 cuts with schema changes among them,
told as captures tell it.
"""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Known, SliceEndpoint
from pyspark_tidemark.lake.target import table_path

from tests.integration.lake.evolving import EvolvingFeed

CUTS = 300
STEP = 10
"""Between the ends of two cuts."""
KEYS = 23


class AcknowledgedFeed(EvolvingFeed):
    """Forgets what a capture may forget: rows below the acknowledgement before the last,
    tables below the last one.
    """

    previous_ts = acked_ts = 0

    def describe(self, ts: int | None = None, *, known: Known | None = None) -> ChangefeedMeta:
        """The tables right below the checkpoint are still known:
        there may be a DDL at it that has yet to be taken.
        """
        if ts is not None and ts < self.acked_ts - 1:
            raise SourceError("ErrRangeCleaned", f"the tables at {ts} are not known any more")
        return super().describe(self.acked_ts if ts is None else ts, known=known)

    def plan(self, start_ts: int, end_ts: int, tables: Any = None) -> list[SliceEndpoint]:
        """The rows above the acknowledgement before the last."""
        if start_ts < self.previous_ts:
            raise SourceError("ErrRangeCleaned", f"rows above {start_ts} are not there any more")
        return super().plan(start_ts, end_ts, tables)

    def ack(self, ts: int) -> int:
        """Move on."""
        if ts > self.acked_ts:
            self.previous_ts, self.acked_ts = self.acked_ts, ts
        return self.acked_ts


def aged_feed(
    seed: int, *, cuts: int = CUTS, statements: bool = True, renames: bool = True
) -> AcknowledgedFeed:
    """`cuts` cuts, each with a few changes; the statements come at fixed shares of them,
    at the end of a cut.
    """
    feed, dice = AcknowledgedFeed(), random.Random(seed)
    rows = _Rows(feed, dice)
    feed.create(0, "bank.t", id=pa.int64(), name=pa.string(), amount=pa.int32(), note=pa.string())
    feed.create(0, "bank.rare", id=pa.int64(), v=pa.string())
    chosen = _statements(feed, renames=renames) if statements else []
    due = {int(share * cuts): statement for share, statement in chosen}
    for number in range(1, cuts + 1):
        rows.change(number * STEP - STEP)
        if number in due:
            due[number](number * STEP)
    return feed


def read_changelog(root: Path, name: str, cut_ts: int) -> list[dict[str, Any]]:
    """A table of a Parquet changelog at a cut, read as docs/format/lake-manifest.md says and with
    none of our code but for the directories of odd names.
    """
    files = (root / "_tidemark_cuts").glob("[0-9]*.json")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: int(line["end_ts"]))
    versions: dict[str, int] = {}
    for line in lines:
        if line["end_ts"] <= cut_ts:
            for old, new in line.get("renamed", []):
                if old in versions:  # in the first line of all, tables have their new names already
                    versions[new] = versions.pop(old)
            versions |= {table["table"]: table["version"] for table in line["tables"]}
    version = versions[name]
    later = [pair for line in lines if line["end_ts"] > cut_ts for pair in line.get("renamed", [])]
    for old, new in later:
        name = new if name == old else name

    directory = Path(table_path(str(root), name))
    marks = [int(path.name.removeprefix("_since-")) for path in directory.glob("_since-*")]
    since = max((ts for ts in marks if ts < version), default=-1)
    return [
        row
        for cut in directory.glob("cut=*")
        if since < int(cut.name.removeprefix("cut=")) <= version
        for part in cut.glob("*.parquet")
        for row in pq.ParquetFile(part).read().to_pylist()
    ]


class _Rows:
    """Writes random rows."""

    def __init__(self, feed: EvolvingFeed, dice: random.Random) -> None:
        self._feed = feed
        self._dice = dice

    def change(self, start_ts: int) -> None:
        """A few changes between the ends of two cuts; the second table has some now and then."""
        for name, held in self._feed.state(start_ts).items():
            if name == "bank.rare" and self._dice.random() < 0.9:
                continue
            keys = self._dice.sample(range(KEYS), self._dice.randint(1, 3))
            columns = self._feed.describe(start_ts).tables[name].schema
            self._feed.put(start_ts + 3, name, *[self._row(columns, key, start_ts) for key in keys])
            gone = [key for key in held if key not in keys]
            if gone and self._dice.random() < 0.3:
                self._feed.delete(start_ts + 5, name, self._dice.choice(gone))

    @staticmethod
    def _row(columns: Any, key: int, ts: int) -> dict[str, Any]:
        row: dict[str, Any] = {"id": key}
        for field in list(columns)[5:]:
            row[field.name] = (
                (ts + key) % 30_000
                if pa.types.is_integer(field.type)
                else f"{field.name} {ts} '{key}\\"
            )
        return row


def _statements(feed: EvolvingFeed, *, renames: bool) -> list[tuple[float, Any]]:
    first = {
        "id": pa.int64(),
        "name": pa.string(),
        "amount": pa.int32(),
        "note": pa.string(),
        "status": pa.string(),
    }
    second = {"id": pa.int64(), "title": pa.string(), "amount": pa.int64(), "status": pa.string()}
    third = second | {"late": pa.string()}
    add = "ALTER TABLE t ADD COLUMN status VARCHAR(10) NOT NULL DEFAULT 'new'"
    change = "ALTER TABLE t RENAME COLUMN name TO title, MODIFY amount BIGINT, DROP COLUMN note"
    more = "ALTER TABLE t ADD COLUMN late TEXT"
    last = "bank.v" if renames else "bank.u"
    found: list[tuple[float, Any]] = [
        (0.22, lambda ts: feed.alter(ts, "bank.t", add, {}, {"status": "new"}, **first)),
        (0.38, lambda ts: feed.alter(ts, "bank.t", change, {"name": "title"}, **second)),
        (0.52, lambda ts: feed.truncate(ts, "bank.t")),
        (0.60, lambda ts: feed.create(ts, "bank.u", id=pa.int64(), v=pa.string())),
        (0.78, lambda ts: feed.drop(ts, last)),
        (0.84, lambda ts: feed.create(ts, last, id=pa.int64(), v=pa.string())),
        (0.92, lambda ts: feed.alter(ts, "bank.t", more, **third)),
    ]
    return [*found, (0.68, lambda ts: feed.rename(ts, "bank.u", "bank.v"))] if renames else found
