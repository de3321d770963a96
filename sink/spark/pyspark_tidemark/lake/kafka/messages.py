"""What goes into a topic: messages of rows, of DDL statements, and the marker that ends a cut.
Pure.

Rows come as Arrow batches and leave as two string columns, keys and values; no Python object is
made for a row. `Encoder` is what a protocol implements: `canal` (canal-json) and `debezium`
(debezium-json). Both write what TiCDC's protocols of these names have; docs/design/0034 has a table
of what differs.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.flight import BEFORE, Ddl, TableMeta
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.schema import ENVELOPE

MARKER_KEY: Final = b'{"tidemark":"cut"}'
MARKER_HEADER: Final = "tidemark"
"""The header of a marker that has its document, see `Marker`."""
_FORMAT = 1
_LOGICAL_BITS = 18


@dataclasses.dataclass(frozen=True)
class Messages:
    """Messages of rows, in their order: two pyarrow string arrays of one length, and how each key
    and each value ends, besides.
    """

    keys: Any
    values: Any
    key_end: str = ""
    """What all keys end with: a schema is many times as long as a row, and comes once like this."""
    value_end: str = ""

    def texts(self) -> list[tuple[str, str]]:
        """The messages as they are in the topic, for tests and figures."""
        pairs = zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True)
        return [(key + self.key_end, value + self.value_end) for key, value in pairs]


@dataclasses.dataclass(frozen=True)
class Message:
    """One message that is none of a row; `value` None: it has none."""

    key: bytes
    value: bytes | None


@dataclasses.dataclass(frozen=True)
class Statement:
    """A DDL statement, and one of its tables; `columns` None where the table ended with it."""

    ddl: Ddl
    kind: str
    """`CREATE`, `ALTER`, `RENAME`, `TRUNCATE` or `ERASE`."""
    table: str
    table_before: str
    """Another name only of one that was renamed."""
    columns: TableMeta | None


@dataclasses.dataclass(frozen=True)
class Marker:
    """The end of a cut, in each partition of the topic: its record, and how many messages of it
    each partition has, markers not counted.
    """

    cut: CutRecord
    messages: tuple[int, ...]

    def to_json(self) -> str:
        """The document, in one line."""
        cut = json.loads(self.cut.to_json())
        return json.dumps({"format": _FORMAT, "cut": cut, "messages": list(self.messages)})

    def within(self, most_bytes: int) -> "Marker":
        """This marker, or one that does not name the tables if its document would be larger."""
        if len(self.to_json()) <= most_bytes:
            return self
        # Whoever goes on with the topic needs the ends of the cut, its mode and what was skipped.
        cut = dataclasses.replace(self.cut, tables=(), dropped=(), renamed=())
        return dataclasses.replace(self, cut=cut)

    @classmethod
    def from_json(cls, text: str) -> "Marker":
        """Read a document.

        Raises:
            SourceError: ErrManifestCorrupt, not a document of this format.
        """
        try:
            fields = json.loads(text)
            is_known = fields["format"] == _FORMAT
            cut = json.dumps(fields["cut"]) if is_known else ""
            messages = tuple(int(count) for count in fields["messages"])
        except (ValueError, KeyError, TypeError):
            cut = ""
        # A record that cannot be read has the same error, whichever part of it is wrong.
        return cls(CutRecord.from_json(cut or text), messages if cut else ())


class Encoder(Protocol):
    """A protocol; `built_ms` is when a message is made, in milliseconds since 1970."""

    ddl_to_all: bool
    """Whether a DDL goes to every partition, or to the first one only."""

    def rows(self, table: TableMeta, batch: Any, built_ms: int) -> Messages:
        """The messages of a pyarrow.RecordBatch of changes; its column `_before` may be missing."""

    def statement(self, statement: Statement, built_ms: int) -> Message:
        """The message of a DDL."""

    def watermark(self, ts: int, built_ms: int) -> bytes | None:
        """The value of a marker: everything up to `ts` has come; None: markers have no value."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The columns of a batch of changes, as encoders need them."""

    op: Any
    commit_ts: Any
    names: list[str]
    columns: list[Any]
    before: Any
    """pyarrow.StructArray, null where the source did not say; None: it never says."""

    @classmethod
    def of(cls, batch: Any) -> "Rows":
        """Take a pyarrow.RecordBatch apart."""
        names = [name for name in batch.schema.names if name not in (*ENVELOPE, BEFORE)]
        before = batch.column(BEFORE) if BEFORE in batch.schema.names else None
        columns = [batch.column(name) for name in names]
        return cls(batch.column("_op"), batch.column("_commit_ts"), names, columns, before)

    @property
    def physical_ms(self) -> Any:
        """The times of the commits, in milliseconds."""
        return pc.shift_right(self.commit_ts, _LOGICAL_BITS)

    @property
    def has_before(self) -> Any:
        """Of which rows it is known what they were before; a delete shows it as the row itself."""
        if self.before is None:
            return pa.array([False] * len(self.op), pa.bool_())
        return self.before.is_valid()

    @property
    def is_insert(self) -> Any:
        """Which rows are inserted."""
        return pc.equal(self.op, "insert")

    @property
    def is_delete(self) -> Any:
        """Which rows are deleted."""
        return pc.equal(self.op, "delete")

    def key_columns(self, key: Sequence[str]) -> list[Any]:
        """Those of a table's key."""
        return [self.columns[self.names.index(name)] for name in key]


def physical_ms(ts: int) -> int:
    """The time of a TSO, in milliseconds since 1970."""
    return ts >> _LOGICAL_BITS


def compact(document: Any) -> str:
    """JSON without blanks, any character as it is."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def joined(*parts: Any) -> Any:
    """One text a row, of columns and of texts that are the same in each row; null is `null`."""
    return pc.binary_join_element_wise(*parts, "", null_handling="replace", null_replacement="null")


def longest(messages: Messages) -> int:
    """The bytes of the largest message's key and value; 0 for none."""
    lengths = pc.add(pc.binary_length(messages.keys), pc.binary_length(messages.values))
    ends = len(messages.key_end.encode()) + len(messages.value_end.encode())
    return int(pc.max(lengths).as_py() or 0) + ends
