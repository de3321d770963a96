"""Everything that can hold GC back, as known at one moment. Pure.

`server.coordinator.explain_service` gathers it. What could not be learnt is said as a `problem`,
never left out: a capture that does not answer is a finding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gcsafepoint.state.states import GcView
from storage.model.ts import compose


@dataclass(frozen=True, slots=True)
class Lock:
    """An open lock; `key` and `primary` in hexadecimal."""

    start_ts: int
    primary: str
    key: str = ""
    ttl_ms: int = 0
    """The time to live, from the physical part of `start_ts` on; the client's heartbeats raise it.
    """
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """A region as its subscriber sees it; id 0: a range that no store serves at this moment,
    or a pump.
    """

    region_id: int
    resolved_ts: int
    store: str = ""
    locks: tuple[Lock, ...] = ()
    problem: str = ""
    pump: str = ""
    """The pump whose binlogs all others wait for; then `store` is its address."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a running changefeed with its slowest regions."""

    name: str
    checkpoint_ts: int
    resolved_ts: int
    regions: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """A changefeed: its record, and its progress from the capture that runs it (`capture` empty:
    none answered).
    """

    id: str
    state: str
    checkpoint_ts: int
    error_code: str = ""
    error: str = ""
    capture: str = ""
    tables: tuple[Table, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it is meant to run."""
        return self.state in ("normal", "warning")

    @property
    def history_is_lost(self) -> bool:
        """Whether GC has passed its checkpoint."""
        return self.error_code in ("ErrSnapshotLostByGC", "ErrStartTsBeforeGC", "ErrGCTTLExceeded")


@dataclass(frozen=True, slots=True)
class Capture:
    """A living member; `problem`: why it did not answer."""

    id: str
    address: str
    is_owner: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """The record of the GC worker."""

    leader: str = ""
    enabled: bool = True
    life_time_ms: int = 600_000
    run_interval_ms: int = 600_000
    last_run: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """All of it."""

    view: GcView
    feeds: Mapping[str, Feed] = field(default_factory=dict)
    captures: tuple[Capture, ...] = ()
    worker: Worker = field(default_factory=Worker)
    problems: tuple[str, ...] = ()

    @property
    def now_ms(self) -> int:
        """The clock TTLs are measured by."""
        return int(self.view.now_s * 1000)

    @property
    def now_ts(self) -> int:
        """The same as a timestamp."""
        return compose(self.now_ms)

    @property
    def wanted_ts(self) -> int:
        """The timestamp that GC would have reached without blockers; two rounds may be
        under way.
        """
        back_ms = self.worker.life_time_ms + 2 * self.worker.run_interval_ms
        return max(self.view.gc_worker.safe_point, compose(max(0, self.now_ms - back_ms)))
