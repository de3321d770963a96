"""One row of mysql.gc_delete_range and of gc_delete_range_done, and when it is its turn (pure).

A range is due when the timestamp of its drop is before the safepoint: no snapshot that may still be read sees it. A day
after it was destroyed it is destroyed once more: a store may have been away, or an old leader have written late.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS

KEPT_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """A range to destroy; keys are raw. `done_ms`: when it was, 0 before; `error`: why the last attempt failed."""

    job_id: int
    element_id: int
    start_key: bytes
    end_key: bytes
    ts: int
    done_ms: int = 0
    attempts: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """Its place among the records."""
        return f"{self.job_id}/{self.element_id}"

    def same(self, other: "DeleteRange") -> bool:
        """Whether both mean the same drop, whatever has been done about it."""
        return replace(self, done_ms=0, attempts=0, error="") == replace(other, done_ms=0, attempts=0, error="")

    def failed(self, error: str) -> "DeleteRange":
        """After one more attempt that failed."""
        return replace(self, attempts=self.attempts + 1, error=error)

    def destroyed(self, now_ms: int) -> "DeleteRange":
        """After the attempt that destroyed it."""
        return replace(self, attempts=self.attempts + 1, error="", done_ms=now_ms)

    def to_json(self) -> str:
        """The record's value; keys in hex, as in the SQL table."""
        return json.dumps(asdict(self) | {"start_key": self.start_key.hex(), "end_key": self.end_key.hex()})

    @classmethod
    def from_json(cls, text: str) -> "DeleteRange":
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            fields = json.loads(text)
            keys = {name: bytes.fromhex(fields[name]) for name in ("start_key", "end_key")}
            return cls(**(fields | keys))
        except (ValueError, TypeError, KeyError) as err:
            raise CorruptError(f"the record of a delete range cannot be read: {text!r}") from err

    @classmethod
    def unreadable(cls, name: str, error: str) -> "DeleteRange":
        """What stands for a record that cannot be read: to be seen by people, never due."""
        job_id, _, element_id = name.partition("/")
        job, element = (int(part) if part.lstrip("-").isdecimal() else 0 for part in (job_id, element_id))
        return cls(job, element, b"", b"", MAX_TS, error=error)


def due(pending: Iterable[DeleteRange], safe_point: int) -> list[DeleteRange]:
    """Those whose drop no readable snapshot precedes, in the order of their drops."""
    return sorted((it for it in pending if it.ts < safe_point), key=lambda it: (it.ts, it.job_id, it.element_id))


def due_again(done: Iterable[DeleteRange], now_ms: int) -> list[DeleteRange]:
    """Those destroyed at least a day ago."""
    return [it for it in done if it.ts != MAX_TS and now_ms - it.done_ms >= KEPT_MS]
