"""What is done between cuts: a little of the target's and the manifest's maintenance at a time, and
which cuts readers may still ask for (those of the last hours, and the one that was newest when
these began).
"""

import dataclasses
import time
from datetime import UTC, datetime, timedelta

from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.target import Health, Target


class KeptCuts:
    """The kept cuts of a manifest, read anew at each call."""

    def __init__(self, manifest: Manifest, hours: float) -> None:
        self._manifest = manifest
        self._hours = hours

    @property
    def horizon(self) -> datetime:
        """When the oldest kept cut may have been applied."""
        return datetime.now(UTC) - timedelta(hours=self._hours)

    def versions(self, table: str) -> frozenset[int]:
        """The versions of `table` that kept cuts show."""
        return versions_since(self._manifest.cuts(), self.horizon, table)


def versions_since(cuts: list[CutRecord], horizon: datetime, table: str) -> frozenset[int]:
    """The versions of a table at any cut that was applied at or after `horizon`,
    or was the newest then. Pure.

    `table` is its newest name: cuts from before a rename name it otherwise.
    """
    versions: dict[str, set[int]] = {}
    for cut in cuts:
        for old, new in cut.renamed:
            versions[new] = versions.pop(old, set())
        is_kept = datetime.fromisoformat(cut.applied_at) >= horizon
        for item in cut.tables:
            if is_kept:
                versions.setdefault(item.table, set()).add(item.version)
            else:
                versions[item.table] = {item.version}
    return frozenset(versions.get(table, ()))


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
