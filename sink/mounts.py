"""How the rows of one span are mounted: a table's mounts, each in force above the DDL that gave it. Pure."""

import bisect
from dataclasses import dataclass

from sink.errors import RangeCrossesDdlError
from sink.ledger import CheckedMount
from sink.mounted import Mount
from storage.model.ts import MAX_TS


@dataclass(frozen=True, slots=True)
class Mounting:
    """The mounts of one version of a table; `before` adds what each row was before, where a source can tell."""

    mount: Mount
    before: Mount | None = None

    def checked(self, table_id: int) -> "Mounting":
        """The same, with every batch counted."""
        before = None if self.before is None else CheckedMount(table_id, self.before)
        return Mounting(CheckedMount(table_id, self.mount), before)

    def with_before(self) -> Mount:
        """The mount that tells what each row was; a table that `SinkManager.follow` added has one."""
        assert self.before is not None, "the table was added without it"
        return self.before


class Mounts:
    """One writer at a time; readers in other threads see all of a change or nothing of it."""

    __slots__ = ("_known", "_table_id")

    def __init__(self, table_id: int, start_ts: int, mounting: Mounting) -> None:
        self._table_id = table_id
        self._known: tuple[tuple[int, ...], tuple[Mounting, ...]] = ((start_ts,), (mounting.checked(table_id),))

    def change(self, ts: int, mounting: Mounting) -> bool:
        """Rows above `ts` are mounted otherwise; False: that is known already."""
        starts, mountings = self._known
        if ts <= starts[-1]:
            return False
        self._known = (*starts, ts), (*mountings, mounting.checked(self._table_id))
        return True

    def above(self, ts: int) -> Mounting:
        """For the rows right above `ts`."""
        starts, mountings = self._known
        return mountings[max(bisect.bisect_right(starts, ts) - 1, 0)]

    def next_change(self, ts: int) -> int:
        """The first DDL above `ts`; MAX_TS: none is known."""
        starts, _ = self._known
        at = max(bisect.bisect_right(starts, ts), 1)
        return starts[at] if at < len(starts) else MAX_TS

    def check_range(self, start_ts: int, end_ts: int) -> None:
        """Refuse a range whose rows have two schemas.

        Raises:
            RangeCrossesDdlError: there is a DDL inside of it.
        """
        change_ts = self.next_change(start_ts)
        if change_ts < end_ts:
            raise crosses(f"table {self._table_id}", start_ts, end_ts, change_ts)

    def forget(self, ts: int) -> None:
        """No range below `ts` is asked for any more."""
        starts, mountings = self._known
        if len(starts) > 1 and starts[1] <= ts:
            at = bisect.bisect_right(starts, ts) - 1
            self._known = starts[at:], mountings[at:]


def crosses(what: str, start_ts: int, end_ts: int, ddl_ts: int) -> RangeCrossesDdlError:
    """Say so."""
    return RangeCrossesDdlError(
        f"the range ({start_ts}, {end_ts}] of {what} crosses the DDL at {ddl_ts}: end it there, take the new schema "
        f"(describe at ts {ddl_ts}), then go on above it"
    )
