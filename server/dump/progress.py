"""How far a dump is: for each table its ranges of keys,
and in each the last key that is at the target for good.

Pure. What is written of it into the metadata: docs/format/dump.md; how it moves:
`server.dump.table_dump`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from storage.model.errors import CorruptError


class TableState(enum.Enum):
    """Of one table of a dump."""

    WAITING = "waiting"
    DUMPING = "dumping"
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read of it."""
        return self in {TableState.DONE, TableState.FAILED, TableState.DROPPED}


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a key as the server gave it: the protocol's type and bytes,
    to be bound again as they are.
    """

    type: int
    data: bytes


Cursor = tuple[Cell, ...]
"""A row's key; rows behind it are those whose key is greater in the server's order."""


@dataclass(frozen=True, slots=True)
class Range:
    """The keys in `(after, until]`, without end where None; `after` moves on."""

    after: Cursor | None = None
    until: Cursor | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class TableProgress:
    """What is durable of one table."""

    name: str
    table_id: int
    job: str
    state: TableState = TableState.WAITING
    error: str = ""
    ranges: tuple[Range, ...] = (Range(),)
    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    rows_estimated: int = 0
    high_ts: int = 0
    """The commit_ts of the last high watermark that counts."""
    rows_per_s: int = 0
    """How fast it went lately."""
    rows_read: int = 0
    """Rows that were read, at the target or not; less again when chunks must be read again."""
    chunks_verified: int = 0
    """Of `chunks`: their sums were those of the server."""
    chunks_repaired: int = 0
    """Chunks that were read again as their sums were not."""

    @classmethod
    def parse(cls, doc: Mapping[str, Any]) -> Self:
        """Read the document of `to_doc`.

        Raises:
            CorruptError: it is not one.
        """
        try:
            return cls(
                name=str(doc["name"]),
                table_id=int(doc["table_id"]),
                job=str(doc["job"]),
                state=TableState(doc["state"]),
                error=str(doc["error"]),
                ranges=tuple(map(_range, doc["ranges"])),
                rows=int(doc["rows"]),
                bytes=int(doc["bytes"]),
                chunks=int(doc["chunks"]),
                rows_estimated=int(doc["rows_estimated"]),
                high_ts=int(doc["high_ts"]),
                rows_per_s=int(doc["rows_per_s"]),
                rows_read=int(doc.get("rows_read", doc["rows"])),
                chunks_verified=int(doc.get("chunks_verified", 0)),
                chunks_repaired=int(doc.get("chunks_repaired", 0)),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise CorruptError(f"not a dump's progress: {err!r}; restart the dump") from err

    def to_doc(self) -> dict[str, Any]:
        """The document in the metadata."""
        return {
            "name": self.name,
            "table_id": self.table_id,
            "job": self.job,
            "state": self.state.value,
            "error": self.error,
            "ranges": [_range_doc(each) for each in self.ranges],
            "rows": self.rows,
            "bytes": self.bytes,
            "chunks": self.chunks,
            "rows_estimated": self.rows_estimated,
            "high_ts": self.high_ts,
            "rows_per_s": self.rows_per_s,
            "rows_read": self.rows_read,
            "chunks_verified": self.chunks_verified,
            "chunks_repaired": self.chunks_repaired,
        }


def _range(doc: Mapping[str, Any]) -> Range:
    return Range(_cursor(doc["after"]), _cursor(doc["until"]), bool(doc["done"]))


def _range_doc(each: Range) -> dict[str, Any]:
    return {"after": _cursor_doc(each.after), "until": _cursor_doc(each.until), "done": each.done}


def _cursor(doc: Any) -> Cursor | None:
    return (
        None if doc is None else tuple(Cell(int(kind), bytes.fromhex(data)) for kind, data in doc)
    )


def _cursor_doc(cursor: Cursor | None) -> list[list[Any]] | None:
    return None if cursor is None else [[cell.type, cell.data.hex()] for cell in cursor]
