"""The protocol between `verify` and its lake process: one question about a table, and answers as
record batches. Pure.
"""

import base64
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.digest import RangeChecksums, Ranges, digests, key_texts, row_texts
from pyspark_tidemark.errors import SourceError

from server.verify.spans import Extent, KeySpans

EXTENT: Final = pa.schema(
    [("rows", pa.int64()), ("least", pa.decimal128(38, 0)), ("greatest", pa.decimal128(38, 0))]
)
_TEXTS: Final = (pa.field("key", pa.string()), pa.field("row", pa.string()))


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Which rows of a merged table are compared: those of one shard."""

    column: str
    """The column of the lake's table that tells shards apart."""
    shard: str
    others: tuple[str, ...] | None = None
    """The names of all other shards: rows of none of these are compared, whatever name they have.
    None: those of `shard` alone.
    """

    def document(self) -> dict[str, Any]:
        """Members for JSON."""
        return {"column": self.column, "shard": self.shard, "others": self.others}

    @classmethod
    def parse(cls, document: dict[str, Any]) -> "ShardPart":
        """Read what `document` gave."""
        others = document["others"]
        return cls(document["column"], document["shard"], others and tuple(others))


@dataclass(frozen=True, slots=True)
class Question:
    """One table as of a cut; can be pickled."""

    name: str
    ts: int
    since: int
    """The last time at which all rows of the table went at once, if the metadata knows of one."""
    key: tuple[str, ...]
    schema: Any
    """The upstream's columns, as a pyarrow.Schema."""
    ranges: Ranges
    chosen: tuple[int, ...] = ()
    spans: KeySpans | None = None
    """The keys that are compared; None: all."""
    part: ShardPart | None = None
    """Which rows are compared, where the lake's table has those of several; None: all."""

    @classmethod
    def parse(cls, request: dict[str, Any]) -> "Question":
        """Read the members of a request."""
        ranges = Ranges(request.get("bits", 0), tuple(request.get("within", ())))
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(request["schema"])))
        key, chosen = tuple(request["key"]), tuple(request.get("chosen", ()))
        spans = KeySpans.parse(request["spans"]) if "spans" in request else None
        part = ShardPart.parse(request["part"]) if "part" in request else None
        return cls(
            *(request["table"], request["ts"], request["since"], key, schema, ranges, chosen),
            spans,
            part,
        )

    @property
    def span_column(self) -> str:
        """The column by which keys have ranges, if they have."""
        return self.key[0 if self.part is None else 1]

    @property
    def answer_schema(self) -> Any:
        """The schema of the rows that `chosen_rows` gives; the key's columns have numbers:
        a table's may be called `key`, too.
        """
        own = [self.schema.field(name).with_name(str(place)) for place, name in enumerate(self.key)]
        return pa.schema([*_TEXTS, *own])

    def summed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The sums of a part of the table, as one row."""
        range_checksums = RangeChecksums(self.ranges)
        for batch in batches:
            range_checksums.add(batch.cast(self.schema), self.key)
        yield pa.RecordBatch.from_pydict({"leaves": [range_checksums.to_bytes()]})

    def extent(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Rows, and the least and the greatest value of the key's first column,
        of a part of the table, as one row.
        """
        rows, ends = 0, pa.array([], pa.decimal128(38, 0))
        for batch in batches:
            rows += batch.num_rows
            least_and_greatest = pc.min_max(batch.cast(self.schema)[self.span_column]).values()
            ends = pa.concat_arrays(
                [ends, pa.array([end.as_py() for end in least_and_greatest], ends.type)]
            )
        least_greatest = pc.min_max(ends)
        columns = [[rows], *([least_greatest[name]] for name in ("min", "max"))]
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, kind) for column, kind in zip(columns, EXTENT.types, strict=True)],
            schema=EXTENT,
        )

    def chosen_rows(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The rows of the chosen ranges: `key` and `row` as text, and the key's columns."""
        for batch in batches:
            rows = batch.cast(self.schema)
            keys = key_texts(rows, self.key)
            mask = pa.array(np.isin(self.ranges.of(digests(keys)), self.chosen))
            rows, keys = rows.filter(mask), keys.filter(mask)
            columns = [keys, row_texts(rows), *(rows[name] for name in self.key)]
            yield pa.RecordBatch.from_arrays(columns, schema=self.answer_schema)


def key_schema(question: Question) -> Any:
    """The schema of the column alone by which keys have ranges."""
    return pa.schema([question.schema.field(question.span_column)])


def whole_extent(parts: Iterable[tuple[int, Any, Any]]) -> Extent:
    """The extent of a whole table, from those that `Question.extent` gave for its parts."""
    extents = list(parts)
    least = min((int(low) for _, low, _ in extents if low is not None), default=None)
    greatest = max((int(high) for _, _, high in extents if high is not None), default=None)
    return Extent(sum(rows for rows, _, _ in extents), least, greatest)


def key_columns(rows: Any, key: Sequence[str]) -> Any:
    """The key's columns, by their names, of a pyarrow.Table of `Question.answer_schema`."""
    return rows.select(range(len(_TEXTS), rows.num_columns)).rename_columns(list(key))


def check_columns(table: str, names: Iterable[str], lake_names: Container[str]) -> None:
    """See that a lake's table has the upstream's columns.

    Raises:
        SourceError: ErrVerifyColumns, it has not.
    """
    missing = [name for name in names if name not in lake_names]
    if missing:
        raise SourceError(
            "ErrVerifyColumns", f"table {table} has no column {', '.join(missing)} in the lake"
        )
