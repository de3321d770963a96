"""Who hears what the worker does: `server.gc_worker.listener` makes logs and metrics of it."""

import enum
from typing import Protocol

from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_range import DeleteRange
from gcsafepoint.worker.round import Round
from storage.model.errors import TidemarkError


class Stage(enum.StrEnum):
    """What is timed, by the names TiDB gives it."""

    PREPARE = "prepare"
    RESOLVE_LOCKS = "resolve_locks"
    DELETE_RANGES = "delete_ranges"
    REDO_DELETE_RANGES = "redo_delete_ranges"
    UPLOAD_SAFE_POINT = "upload_safe_point"
    DO_GC = "do_gc"
    TOTAL = "total"


class Listener(Protocol):
    """Told of everything; must not raise and must not wait."""

    def led(self, *, leads: bool) -> None:
        """After each tick."""
        ...

    def tick_failed(self, err: TidemarkError) -> None:
        """The coordinator or the metadata store could not be asked."""
        ...

    def configured(self, config: GCConfig) -> None:
        """The configuration the leader found at its tick."""
        ...

    def life_time_raised(self, found_ms: int, least_ms: int) -> None:
        """Somebody wrote a shorter life time than may be set; the least one is used."""
        ...

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        """A store could not be told its write rate."""
        ...

    def round_skipped(self, err: TidemarkError) -> None:
        """A round came while another one was in its first phases."""
        ...

    def held_back(self, it: Round, asked_ts: int, *, moved: bool) -> None:
        """The safepoint is not what age alone would allow, or did not move at all."""
        ...

    def stage_began(self, stage: Stage, it: Round) -> None:
        """A stage of a round begins."""
        ...

    def stage_ended(self, stage: Stage, it: Round, seconds: float, err: TidemarkError | None) -> None:
        """A stage was gone through, or an error ended it."""
        ...

    def page_resolved(self, locks: int, *, more: bool) -> None:
        """A page of locks is gone; `more`: its region has others."""
        ...

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None, *, redo: bool) -> None:
        """A range was destroyed, or could not be."""
        ...

    def region_collected(self, err: TidemarkError | None) -> None:
        """In mode central: a region dropped its old versions, or did not."""
        ...

    def round_ended(self, it: Round) -> None:
        """A round is over."""
        ...

    def not_remembered(self, it: Round, err: TidemarkError) -> None:
        """A round could not be written to the history."""
        ...
