"""`Listener`: the events of a GC worker; `server.gc_worker.listener` writes logs and metrics of
them.
"""

import enum
from typing import Protocol

from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_ranges import DeleteRange
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
    """Receives every event of a worker; its methods must neither raise nor wait."""

    def led(self, *, leads: bool) -> None:
        """A tick ended; `leads` says whether this worker leads."""
        ...

    def tick_failed(self, err: TidemarkError) -> None:
        """The coordinator or the metadata store could not be asked."""
        ...

    def configured(self, config: GCConfig) -> None:
        """The leader read this configuration at its tick."""
        ...

    def life_time_raised(self, configured_ms: int, least_ms: int) -> None:
        """Somebody wrote a shorter life time than may be set; the least one is used."""
        ...

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        """A store could not be told its write rate."""
        ...

    def round_skipped(self, err: TidemarkError) -> None:
        """A round was due while another one was in its first phases."""
        ...

    def held_back(self, gc_round: Round, target_ts: int, *, moved: bool) -> None:
        """The safepoint is below what the life time alone would allow, or did not move at all."""
        ...

    def stage_began(self, stage: Stage, gc_round: Round) -> None:
        """A stage of a round begins."""
        ...

    def stage_ended(
        self, stage: Stage, gc_round: Round, seconds: float, err: TidemarkError | None
    ) -> None:
        """A stage was gone through, or an error ended it."""
        ...

    def page_resolved(self, locks: int, *, more: bool) -> None:
        """A page of locks is gone; `more`: its region has others."""
        ...

    def range_deleted(
        self, delete_range: DeleteRange, err: TidemarkError | None, *, redo: bool
    ) -> None:
        """A range was destroyed, or could not be."""
        ...

    def region_collected(self, err: TidemarkError | None) -> None:
        """In mode central: a region dropped its old versions, or did not."""
        ...

    def round_ended(self, gc_round: Round) -> None:
        """A round is over."""
        ...

    def round_not_recorded(self, gc_round: Round, err: TidemarkError) -> None:
        """A round could not be written to the history."""
        ...
