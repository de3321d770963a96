"""The phase Delete Ranges: what a dropped table or index left, destroyed physically and at once.

A range is due when the timestamp of its drop is before the safepoint: no snapshot that may still be read sees it. It
goes to every store, then to the done records, is destroyed once more after a day (a store may have been away, or an old
leader have written late), and is then forgotten. Each range succeeds or fails by itself.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from gcsafepoint.worker.cluster import Cluster, KeyRange
from gcsafepoint.worker.election import LeaseLostError
from gcsafepoint.worker.records import DONE, PENDING, Records
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.model.ts import physical_ms
from storage.tasks import together

KEPT_MS = 24 * 3600 * 1000
Fence = Callable[[], Mapping[str, int]]
Report = Callable[["DeleteRange", TidemarkError | None], None]
"""Told about every range: destroyed, or why not."""


class DeleteRangeError(InvalidError):
    """The range cannot be recorded."""

    code = "ErrDeleteRange"


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """One row of mysql.gc_delete_range; `done_ms` only in gc_delete_range_done. Keys are raw."""

    job_id: int
    element_id: int
    start_key: bytes
    end_key: bytes
    ts: int
    done_ms: int = 0

    @property
    def name(self) -> str:
        """Its place among the records."""
        return f"{self.job_id}/{self.element_id}"

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


def due(pending: Iterable[DeleteRange], safe_point: int) -> list[DeleteRange]:
    """Those whose drop no readable snapshot precedes, in the order of their drops."""
    return sorted((it for it in pending if it.ts < safe_point), key=lambda it: (it.ts, it.job_id, it.element_id))


def due_again(done: Iterable[DeleteRange], now_ms: int) -> list[DeleteRange]:
    """Those destroyed at least a day ago."""
    return [it for it in done if now_ms - it.done_ms >= KEPT_MS]


async def register(records: Records, new: DeleteRange) -> None:
    """Record a range to be destroyed once its ts is before the safepoint; durable when it returns.

    Raises:
        DeleteRangeError: an empty or endless range, or another one of the same job and element.
    """
    if not new.start_key < new.end_key:
        raise DeleteRangeError(f"the range [{new.start_key.hex()}, {new.end_key.hex()}) is empty or has no end")
    if not new.ts:
        raise DeleteRangeError("a range to delete needs the timestamp of its drop")
    key = PENDING + new.name
    if not await records.write({key: new.to_json()}, {key: 0, DONE + new.name: 0}):
        held = await records.read(key) or await records.read(DONE + new.name)
        if not any(_same(DeleteRange.from_json(record.value), new) for record in held.values()):
            raise DeleteRangeError(f"job {new.job_id} element {new.element_id} has another range already")


async def delete_ranges(cluster: Cluster, records: Records, fence: Fence, safe_point: int, report: Report) -> None:
    """Destroy what is due on every store, and what was done a day ago once more.

    Raises:
        LeaseLostError: another worker leads; what is left is its work.
    """
    now_ms = physical_ms(await cluster.now_ts())
    for it in due(await load(records, PENDING), safe_point):
        if await _destroyed(cluster, it, report):
            done = replace(it, done_ms=now_ms).to_json()
            await records.write({PENDING + it.name: None, DONE + it.name: done}, fence())
    for it in due_again(await load(records, DONE), now_ms):
        if await _destroyed(cluster, it, report):
            await records.write({DONE + it.name: None}, fence())


async def load(records: Records, prefix: str) -> list[DeleteRange]:
    """The recorded ranges under `PENDING` or `DONE`."""
    return [DeleteRange.from_json(record.value) for record in (await records.read(prefix)).values()]


async def _destroyed(cluster: Cluster, it: DeleteRange, report: Report) -> bool:
    within = KeyRange(it.start_key, it.end_key)
    try:
        await together(cluster.destroy_range(address, within) for address in await cluster.store_addresses())
    except LeaseLostError:
        raise
    except TidemarkError as err:
        report(it, err)
        return False
    report(it, None)
    return True


def _same(left: DeleteRange, right: DeleteRange) -> bool:
    return replace(left, done_ms=0) == replace(right, done_ms=0)
