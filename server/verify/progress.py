"""Progress of a comparison: the stage of the present table, rows read, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

UPSTREAM: Final = "the source"
LAKE: Final = "the lake"


class Progress:
    """The progress of one comparison; lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = self._stage_s = self._tables_s = clock()
        self._stage = "reading the changefeed's records"
        self._table = ""
        self._tables_total = self._tables_done = 0
        self._rows = self._rows_expected = self._rows_total = 0
        self._awaited: list[str] = []

    def enter(self, stage: str, table: str = "") -> None:
        """A new stage begins, of one table or of all."""
        self._stage, self._table = stage, table
        self._stage_s, self._rows = self._clock(), 0

    @property
    def table(self) -> str:
        """The one that the stage is of; empty: none."""
        return self._table

    def begin_tables(self, count: int) -> None:
        """Set how many tables are compared from now on."""
        self._tables_total, self._tables_s = count, self._clock()

    def end_table(self) -> None:
        """Count a table that is compared."""
        self._tables_done += 1
        self._rows_expected = 0

    def read(self, rows: int) -> None:
        """The upstream gave so many rows more."""
        self._rows += rows
        self._rows_total += rows

    def expect(self, rows: int) -> None:
        """Note how many rows one side has counted in the table."""
        self._rows_expected = max(self._rows_expected, rows)

    @contextmanager
    def awaiting(self, side: str) -> Iterator[None]:
        """An answer of that side is waited for, for the block;
        an error in it leaves what was waited for to be told.
        """
        self._awaited.append(side)
        yield
        self._awaited.remove(side)

    @property
    def eta_s(self) -> float | None:
        """Return the estimated seconds until all tables are compared, at the present pace; None:
        not known yet.
        """
        if not self._tables_total or self._is_lake_awaited:
            return None
        within = min(self._rows / self._rows_expected, 1.0) if self._rows_expected else 0.0
        done = self._tables_done + within
        left = self._tables_total - done
        return None if not done else (self._clock() - self._tables_s) * left / done

    @property
    def _is_lake_awaited(self) -> bool:
        """The upstream's rows are there, and nothing tells how far the lake's reader is: Spark may
        take half a minute to start.
        """
        return set(self._awaited) == {LAKE}

    def line(self) -> str:
        """All of it in words."""
        now_s = self._clock()
        stage_s = now_s - self._stage_s
        parts = [f"{self._table}: {self._stage}" if self._table else self._stage]
        if self._tables_total:
            parts.append(f"{self._tables_done} of {self._tables_total} tables done")
        if self._rows:
            of = f" of {self._rows_expected}" if self._rows_expected > self._rows else ""
            rate = f", {self._rows / max(stage_s, 1e-3):.0f} rows/s"
            parts.append(f"{self._rows}{of} rows{'' if self._is_lake_awaited else rate}")
        if self._awaited:
            parts.append(
                f"waiting for {' and '.join(sorted(set(self._awaited)))} for {stage_s:.0f} s"
            )
        if self.eta_s is not None:
            parts.append(f"about {self.eta_s:.0f} s to go")
        return f"{', '.join(parts)} ({now_s - self._started_s:.0f} s in all)"

    def document(self) -> dict[str, Any]:
        """All of it for JSON."""
        now_s = self._clock()
        return {
            "stage": self._stage,
            "table": self._table or None,
            "stage_seconds": round(now_s - self._stage_s, 1),
            "waiting_for": sorted(set(self._awaited)),
            "tables": self._tables_total,
            "tables_done": self._tables_done,
            "rows": self._rows,
            "rows_expected": self._rows_expected or None,
            "rows_total": self._rows_total,
            "eta_seconds": None if self.eta_s is None else round(self.eta_s, 1),
            "seconds": round(now_s - self._started_s, 1),
        }
