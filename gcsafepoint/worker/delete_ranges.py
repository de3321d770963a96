"""The phase Delete Ranges: what a dropped table or index left, destroyed physically and at once.

A range goes to every store, then to the done records, is destroyed once more after a day, and is then forgotten. Each
range succeeds or fails by itself; one that failed keeps its error and its place, and the next round tries it again.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gcsafepoint.worker.cluster import Cluster, KeyRange
from gcsafepoint.worker.delete_range import DeleteRange, due, due_again
from gcsafepoint.worker.election import LeaseLostError
from gcsafepoint.worker.records import DONE, PENDING, SAFE_POINT_TS, Records, read_ts
from storage.model.errors import CorruptError, InvalidError, TidemarkError
from storage.tasks import together

MAX_KEY_BYTES = 8192
_AT_ONCE = 4  # a store that hangs holds up its range for minutes, the others go on
Fence = Callable[[], Mapping[str, int]]
Report = Callable[[DeleteRange, TidemarkError | None], None]
"""Told about every range: destroyed, or why not."""


class DeleteRangeError(InvalidError):
    """The range cannot be recorded."""

    code = "ErrDeleteRange"


@dataclass(frozen=True, slots=True)
class DueRanges:
    """What the phase has to do: for the first time, and once more."""

    first: list[DeleteRange]
    again: list[DeleteRange]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.first) + len(self.again)


async def register(records: Records, new: DeleteRange) -> None:
    """Record a range to be destroyed once its ts is before the safepoint; durable when it returns.

    Raises:
        DeleteRangeError: as `check`, or there is another range of the same job and element.
    """
    check(new)
    key = PENDING + new.name
    if not await records.write({key: new.to_json()}, {key: 0, DONE + new.name: 0}):
        held = [it for it in (*await load(records, PENDING), *await load(records, DONE)) if it.name == new.name]
        if not any(it.same(new) for it in held):
            raise DeleteRangeError(f"job {new.job_id} element {new.element_id} has another range already")


async def withdraw(records: Records, job_id: int, element_id: int, *, dry_run: bool = False) -> DeleteRange:
    """Forget a range that no round can have begun to destroy, and return it; durable when it returns.

    A round destroys nothing at or above the recorded safepoint, so the range is forgotten on condition that this has
    not moved. With `dry_run` it stays.

    Raises:
        DeleteRangeError: there is no such range, it is due, or it was destroyed.
    """
    name = f"{job_id}/{element_id}"
    while True:
        before = await records.read(SAFE_POINT_TS)
        held = (await records.read(PENDING + name)).get(PENDING + name)
        if held is None:
            gone = DONE + name in await records.read(DONE + name)
            raise DeleteRangeError(f"job {job_id} element {element_id} {'was destroyed' if gone else 'has no range'}")
        found, safe_point = _read(name, held.value), await read_ts(records, SAFE_POINT_TS)
        if found.ts < safe_point:
            raise DeleteRangeError(
                f"job {job_id} element {element_id} is due: its ts {found.ts} is before the safepoint {safe_point}, so "
                "a round may have begun to destroy it"
            )
        unchanged = {PENDING + name: held.revision}
        unchanged[SAFE_POINT_TS] = before[SAFE_POINT_TS].revision if SAFE_POINT_TS in before else 0
        if dry_run or await records.write({PENDING + name: None}, unchanged):
            return found


def check(new: DeleteRange) -> None:
    """Refuse what can never be destroyed.

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
    """The recorded ranges under `PENDING` or `DONE`; what cannot be read is `DeleteRange.unreadable`."""
    return [_read(key.removeprefix(prefix), record.value) for key, record in (await records.read(prefix)).items()]


async def load_due(records: Records, safe_point: int, now_ms: int) -> DueRanges:
    """What is to be destroyed at `safe_point` and `now_ms`."""
    return DueRanges(
        due(await load(records, PENDING), safe_point),
        due_again(await load(records, DONE), now_ms),
    )


async def delete_first(
    cluster: Cluster, records: Records, fence: Fence, ranges: Iterable[DeleteRange], now_ms: int, report: Report
) -> None:
    """Destroy ranges on every store and move their records to done.

    Raises:
        LeaseLostError: another worker leads; what is left is its work.
    """

    async def one(it: DeleteRange) -> None:
        if err := await _destroy(cluster, it, report):
            await records.write({PENDING + it.name: it.failed(str(err)).to_json()}, fence())
        else:
            done = it.destroyed(now_ms).to_json()
            await records.write({PENDING + it.name: None, DONE + it.name: done}, fence())

    await _all(one, ranges)


async def delete_again(
    cluster: Cluster, records: Records, fence: Fence, ranges: Iterable[DeleteRange], report: Report
) -> None:
    """Destroy ranges once more and forget them. Raises as `delete_first`."""

    async def one(it: DeleteRange) -> None:
        err = await _destroy(cluster, it, report)
        await records.write({DONE + it.name: it.failed(str(err)).to_json() if err else None}, fence())

    await _all(one, ranges)


async def _all(one: Callable[[DeleteRange], Awaitable[None]], ranges: Iterable[DeleteRange]) -> None:
    waiting: Iterator[DeleteRange] = iter(list(ranges))

    async def work() -> None:
        for it in waiting:
            await one(it)

    await together(work() for _ in range(_AT_ONCE))


async def _destroy(cluster: Cluster, it: DeleteRange, report: Report) -> TidemarkError | None:
    within = KeyRange(it.start_key, it.end_key)
    try:
        await together(cluster.destroy_range(address, within) for address in await cluster.store_addresses())
    except LeaseLostError:
        raise
    except TidemarkError as err:
        report(it, err)
        return err
    report(it, None)
    return None


def _read(name: str, text: str) -> DeleteRange:
    try:
        return DeleteRange.from_json(text)
    except CorruptError as err:
        return DeleteRange.unreadable(name, err.message)
