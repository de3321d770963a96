"""Key ranges of dropped tables and indexes: their records, and the phase Delete Ranges, which
destroys them on every store.

A `DeleteRange` is a row of mysql.gc_delete_range (`PENDING` among the records) or of
gc_delete_range_done (`DONE`). `register` records one; it is due when the timestamp of its drop is
before the safepoint, for then no snapshot that may still be read sees it. `delete_first` destroys
it on every store and moves its record to done. A day later `delete_again` destroys it once more and
forgets it: a store may have been away, or an old leader have written late.

Each range succeeds or fails by itself; one that failed keeps its error and its place, and the next
round tries it again.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.election import Fence, LeaseLostError, write_fenced
from gcsafepoint.worker.records import DONE, PENDING, SAFE_POINT_TS, Records, read_ts
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.model.span import KeyRange
from storage.model.ts import MAX_TS
from storage.tasks import gather

MAX_KEY_BYTES = 8192
KEPT_MS = 24 * 3600 * 1000
# A store that hangs delays its range by minutes; the other ranges are not delayed.
_CONCURRENT_RANGES = 4


class DeleteRangeError(InvalidError):
    """The range cannot be recorded."""

    code = "ErrDeleteRange"


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """A range to destroy; keys are raw.

    `done_ms`: when it was, 0 before; `error`: why the last attempt failed.
    """

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
        """The end of its record's key."""
        return f"{self.job_id}/{self.element_id}"

    def is_same_drop(self, other: "DeleteRange") -> bool:
        """Whether both are of the same drop, whatever their progress."""
        return replace(self, done_ms=0, attempts=0, error="") == replace(
            other, done_ms=0, attempts=0, error=""
        )

    def failed(self, error: str) -> "DeleteRange":
        """This range after one more attempt, which failed."""
        return replace(self, attempts=self.attempts + 1, error=error)

    def destroyed(self, now_ms: int) -> "DeleteRange":
        """This range after the attempt that destroyed it."""
        return replace(self, attempts=self.attempts + 1, error="", done_ms=now_ms)

    def to_json(self) -> str:
        """The record's value; keys in hex, as in the SQL table."""
        return json.dumps(
            asdict(self) | {"start_key": self.start_key.hex(), "end_key": self.end_key.hex()}
        )

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
        """Stands for a record that cannot be read: it is listed with its error, and never due."""
        job_id, _, element_id = name.partition("/")
        job, element = (
            int(part) if part.lstrip("-").isdecimal() else 0 for part in (job_id, element_id)
        )
        return cls(job, element, b"", b"", MAX_TS, error=error)


Report = Callable[[DeleteRange, TidemarkError | None], None]
"""Called once for every range: with None when it was destroyed, with the error when it was not."""


@dataclass(frozen=True, slots=True)
class DueRanges:
    """The ranges that the phase must destroy: for the first time, and again a day later."""

    first: list[DeleteRange]
    again: list[DeleteRange]

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self.first) + len(self.again)


async def register(records: Records, new: DeleteRange) -> None:
    """Record a range to be destroyed once its ts is before the safepoint; durable when it returns.

    Raises:
        DeleteRangeError: as `check`, or there is another range of the same job and element.
    """
    check(new)
    key = PENDING + new.name
    # Neither pending nor done: a request that is repeated, since its answer was lost, records
    # nothing twice.
    if not await records.write({key: new.to_json()}, {key: 0, DONE + new.name: 0}):
        recorded = [*await load(records, PENDING), *await load(records, DONE)]
        if not any(old.name == new.name and old.is_same_drop(new) for old in recorded):
            raise DeleteRangeError(
                f"job {new.job_id} element {new.element_id} has another range already"
            )


async def withdraw(
    records: Records, job_id: int, element_id: int, *, dry_run: bool = False
) -> DeleteRange:
    """Delete the record of a range that no round can have begun to destroy, and return it; durable.

    A round destroys nothing at or above the recorded safepoint, so the deletion is conditional on
    that safepoint not having moved. With `dry_run` nothing is deleted.

    Raises:
        DeleteRangeError: there is no such range, it is due, or it was destroyed.
    """
    name = f"{job_id}/{element_id}"
    while True:
        # The safepoint's revision is read before its value is judged below, and is a condition of
        # the write: a round that began in between makes this one look again.
        before = await records.read(SAFE_POINT_TS)
        record = (await records.read(PENDING + name)).get(PENDING + name)
        if record is None:
            gone = DONE + name in await records.read(DONE + name)
            raise DeleteRangeError(
                f"job {job_id} element {element_id} {'was destroyed' if gone else 'has no range'}"
            )
        delete_range, safe_point = _read(name, record.value), await read_ts(records, SAFE_POINT_TS)
        if delete_range.ts < safe_point:
            raise DeleteRangeError(
                f"job {job_id} element {element_id} is due: its ts {delete_range.ts} is before "
                f"the safepoint {safe_point}, so a round may have begun to destroy it"
            )
        unchanged = {PENDING + name: record.revision}
        unchanged[SAFE_POINT_TS] = before[SAFE_POINT_TS].revision if SAFE_POINT_TS in before else 0
        if dry_run or await records.write({PENDING + name: None}, unchanged):
            return delete_range


def check(new: DeleteRange) -> None:
    """Refuse a range that can never be destroyed.

    Raises:
        DeleteRangeError: an empty or endless range, too long keys, or no timestamp.
    """
    if max(len(new.start_key), len(new.end_key)) > MAX_KEY_BYTES:
        raise DeleteRangeError(f"a key of a range has at most {MAX_KEY_BYTES} bytes")
    if not new.start_key < new.end_key:
        shown = ", ".join(key[:64].hex() for key in (new.start_key, new.end_key))
        raise DeleteRangeError(f"the range [{shown}) is empty or has no end")
    if not 0 < new.ts < 1 << 64:
        raise DeleteRangeError("a range to delete needs the timestamp of its drop")


async def load(records: Records, prefix: str) -> list[DeleteRange]:
    """The recorded ranges under `PENDING` or `DONE`;
    what cannot be read is `DeleteRange.unreadable`.
    """
    return [
        _read(key.removeprefix(prefix), record.value)
        for key, record in (await records.read(prefix)).items()
    ]


async def load_due(records: Records, safe_point: int, now_ms: int) -> DueRanges:
    """The ranges that are to be destroyed at `safe_point` and `now_ms`."""
    return DueRanges(
        due(await load(records, PENDING), safe_point),
        due_again(await load(records, DONE), now_ms),
    )


def due(pending: Iterable[DeleteRange], safe_point: int) -> list[DeleteRange]:
    """The ranges dropped before `safe_point`, which no snapshot that may still be read sees; in the
    order of their drops.
    """
    return sorted(
        (delete_range for delete_range in pending if delete_range.ts < safe_point),
        key=lambda delete_range: (delete_range.ts, delete_range.job_id, delete_range.element_id),
    )


def due_again(done: Iterable[DeleteRange], now_ms: int) -> list[DeleteRange]:
    """The ranges destroyed at least a day ago."""
    return [
        delete_range
        for delete_range in done
        if delete_range.ts != MAX_TS and now_ms - delete_range.done_ms >= KEPT_MS
    ]


async def delete_first(
    cluster: Cluster,
    records: Records,
    fence: Fence,
    ranges: Iterable[DeleteRange],
    now_ms: int,
    report: Report,
) -> None:
    """Destroy ranges on every store and move their records to done.

    Raises:
        LeaseLostError: another worker leads; what is left is its work.
    """

    async def one(delete_range: DeleteRange) -> None:
        # Only when every store has destroyed it is it done; a crash before the write repeats it,
        # which is harmless.
        changes: dict[str, str | None]
        if err := await _destroy(cluster, delete_range, report):
            changes = {PENDING + delete_range.name: delete_range.failed(str(err)).to_json()}
        else:
            done = delete_range.destroyed(now_ms).to_json()
            changes = {PENDING + delete_range.name: None, DONE + delete_range.name: done}
        await write_fenced(records, fence, changes)

    await _all(one, ranges)


async def delete_again(
    cluster: Cluster, records: Records, fence: Fence, ranges: Iterable[DeleteRange], report: Report
) -> None:
    """Destroy ranges once more and forget them. Raises as `delete_first`."""

    async def one(delete_range: DeleteRange) -> None:
        err = await _destroy(cluster, delete_range, report)
        failed = delete_range.failed(str(err)).to_json() if err else None
        await write_fenced(records, fence, {DONE + delete_range.name: failed})

    await _all(one, ranges)


async def _all(
    one: Callable[[DeleteRange], Awaitable[None]], ranges: Iterable[DeleteRange]
) -> None:
    # One iterator that all tasks share: each range is taken once.
    waiting: Iterator[DeleteRange] = iter(list(ranges))

    async def work() -> None:
        for delete_range in waiting:
            await one(delete_range)

    await gather(work() for _ in range(_CONCURRENT_RANGES))


async def _destroy(
    cluster: Cluster, delete_range: DeleteRange, report: Report
) -> TidemarkError | None:
    """Destroy it on every store; returns the first store's error, None if all have done it."""
    within = KeyRange(delete_range.start_key, delete_range.end_key)

    # Each store by itself: one that is down refuses at once, round after round, and would cancel
    # the requests that the others are still working on.
    async def on_store(address: str) -> TidemarkError | None:
        try:
            await cluster.destroy_range(address, within)
        except LeaseLostError:
            # No failure of this range: the next leader does it.
            raise
        except TidemarkError as err:
            return err
        return None

    try:
        errors = await gather(on_store(address) for address in await cluster.store_addresses())
    except LeaseLostError:
        raise
    except TidemarkError as err:  # the coordinator did not name the stores
        errors = [err]
    error = next((err for err in errors if err is not None), None)
    report(delete_range, error)
    return error


def _read(name: str, text: str) -> DeleteRange:
    try:
        return DeleteRange.from_json(text)
    except CorruptError as err:
        return DeleteRange.unreadable(name, err.message)
