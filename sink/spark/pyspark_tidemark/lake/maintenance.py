"""The maintenance of a lake between cuts: a little of the target's and the manifest's at a time.
`KeptCuts` are the cuts that readers may still ask for: those of the last hours, and the one that
was the newest when these hours began.
"""

import dataclasses
import threading
import time
from array import array
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.target import Health, Target

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class KeptCuts:
    """Implements `target.Retention`: the kept cuts of a manifest, read once and then updated with
    each cut; thread-safe.

    It keeps 16 bytes for each cut that changes a table: the version, and when it was applied.
    """

    def __init__(self, manifest: Manifest, hours: float) -> None:
        self._manifest = manifest
        self._hours = hours
        self._lock = threading.Lock()
        self._tables: dict[str, _Versions] = {}
        self._followed_ts: int | None = None
        """Up to which cut; None: none was read yet."""

    @property
    def horizon(self) -> datetime:
        """When the oldest kept cut may have been applied."""
        return datetime.now(UTC) - timedelta(hours=self._hours)

    def versions(self, table: str) -> frozenset[int]:
        """The versions of `table` that kept cuts show."""
        with self._lock:
            self._follow()
            versions = self._tables.get(table)
            return frozenset() if versions is None else versions.since(self.horizon)

    def follow(self) -> None:
        """Add the newest cut; call it after each cut, or all are read again."""
        with self._lock:
            # Nothing is read before the first call of `versions`: many jobs never need it.
            if self._followed_ts is not None:
                self._follow()

    def _follow(self) -> None:
        last = self._manifest.last
        if last is None or last.end_ts == self._followed_ts:
            return
        if last.start_ts == self._followed_ts:
            self._take(last)
            return
        self._tables, self._followed_ts = {}, None
        for cut in self._manifest.each_cut():
            self._take(cut)

    def _take(self, cut: CutRecord) -> None:
        # One that was repaired comes twice, and has other versions then.
        for old, new in cut.renamed if cut.end_ts != self._followed_ts else ():
            self._tables[new] = self._tables.pop(old, _Versions())
        applied_at, horizon = datetime.fromisoformat(cut.applied_at), self.horizon
        for item in cut.tables:
            versions = self._tables.setdefault(item.table, _Versions())
            versions.add(item.version, applied_at, horizon)
        self._followed_ts = cut.end_ts


class _Versions:
    """The versions of a table, by the time of the cuts that name them."""

    def __init__(self) -> None:
        self._versions = array("q")
        self._applied_ms = array("q")

    def add(self, version: int, applied_at: datetime, horizon: datetime) -> None:
        """Add the newest version; drop those that no kept cut shows."""
        if self._versions and self._versions[-1] == version:
            # It was shown since the first of the two.
            return
        # A clock that went back must not make it older than the one before.
        before_ms = self._applied_ms[-1] if self._applied_ms else 0
        self._versions.append(version)
        self._applied_ms.append(max(before_ms, _ms(applied_at)))
        outdated = bisect_left(self._applied_ms, _ms(horizon)) - 1
        # Not each time: what is behind moves up.
        if outdated > len(self._versions) // 2:
            del self._versions[:outdated], self._applied_ms[:outdated]

    def since(self, horizon: datetime) -> frozenset[int]:
        """Those at any cut that was applied at or after a time, or was the newest then."""
        first = max(0, bisect_left(self._applied_ms, _ms(horizon)) - 1)
        return frozenset(self._versions[first:])


def _ms(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


class Maintenance:
    """The maintenance of a lake between two cuts, a little at a time."""

    def __init__(self, target: Target, manifest: Manifest, hours: float) -> None:
        self._target = target
        self._manifest = manifest
        self._kept = KeptCuts(manifest, hours)

    def maintain(self) -> dict[str, float] | None:
        """Do what is due; returns the health of the table that had its turn and how long the cuts
        waited, for the job's line.
        """
        began = time.monotonic()
        self._kept.follow()
        self._manifest.tidy(self._kept.horizon)
        health = self._target.maintain(self._kept)
        if health is None:
            return None
        return (
            dataclasses.asdict(health)
            | _ratios(health)
            | {"seconds": round(time.monotonic() - began, 3)}
        )

    def close(self) -> None:
        """Wait for work that goes on beside the cuts."""
        self._target.close()


def _ratios(health: Health) -> dict[str, float]:
    return {
        "small_file_ratio": round(health.small_files / max(health.files, 1), 3),
        "deleted_row_ratio": round(health.deleted_rows / max(health.rows, 1), 3),
    }
