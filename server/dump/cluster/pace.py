"""How many rows a chunk of the cluster has, and when the next may be read: by time,
bytes and the job's rates. Pure.
"""

from dataclasses import dataclass
from typing import Final

from server.dump.job import Job

_ROWS_MAX: Final = 65_536
_TARGET_S: Final = 0.25
_TARGET_BYTES: Final = 1 << 20


@dataclass(slots=True)
class ChunkPace:
    """Of one table: as many rows as take about `_TARGET_S` and `_TARGET_BYTES`,
    changed by a factor of two.
    """

    rows: int = 64
    row_bytes: float = 0.0
    """Of the last chunk, on average."""

    def limit(self, job: Job, pages: int) -> int:
        """How many rows each of so many pages may have:
        together no more than the job allows in a second.
        """
        most = [self.rows]
        if job.rows_per_s:
            most.append(job.rows_per_s // pages)
        if job.bytes_per_s and self.row_bytes:
            most.append(int(job.bytes_per_s / self.row_bytes / pages))
        return max(min(most), 1)

    def took(self, rows: int, size_bytes: int, seconds: float) -> None:
        """A page of so many rows took so long."""
        if rows == 0:
            return
        self.row_bytes = size_bytes / rows
        target_rows = min(
            rows * _TARGET_S / max(seconds, 1e-4), _TARGET_BYTES / max(self.row_bytes, 1)
        )
        self.rows = int(min(max(target_rows, self.rows / 2, 1), self.rows * 2, _ROWS_MAX))

    def failed(self) -> None:
        """A page was not to be had: it may have been too large."""
        self.rows = max(self.rows // 4, 1)


def least_s(job: Job, rows: int, size_bytes: int) -> float:
    """How long so much has to take."""
    by_rows = rows / job.rows_per_s if job.rows_per_s else 0.0
    return max(by_rows, size_bytes / job.bytes_per_s if job.bytes_per_s else 0.0)
