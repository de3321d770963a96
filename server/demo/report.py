"""What the demo shows: a line of progress each second, and the table at the end."""

import asyncio
import sys
import time

from server.demo.lake import Applied
from server.demo.proof import Proof
from server.demo.workload import Tally
from storage.model.ts import physical_ms

_EVERY_SECONDS = 1.0


class Progress:
    """The line of progress; on a terminal it overwrites itself."""

    def __init__(self, transactions: int, tally: Tally, job: Applied) -> None:
        self._transactions = transactions
        self._tally = tally
        self._job = job
        self._began = time.monotonic()

    async def run(self) -> None:
        """Print until cancelled."""
        end = "\r" if sys.stdout.isatty() else "\n"
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            print(self._line(), end=end, flush=True)

    def _line(self) -> str:
        done, job = self._tally.committed + self._tally.rolled_back, self._job
        elapsed = time.monotonic() - self._began
        eta = f"ETA {elapsed / done * (self._transactions - done):3.0f} s" if done else "ETA   ? s"
        lag = f"{time.time() - physical_ms(job.applied_ts) / 1000:5.1f} s" if job.applied_ts else "starting"
        return (
            f"[{elapsed:5.1f} s] transactions {done}/{self._transactions} ({eta})  rows in {self._tally.row_changes}"
            f"  rows in the lake {job.rows}  lag {lag}  checkpoint {job.applied_ts}  cuts {job.cuts}"
        )


def summary(proof: Proof, tally: Tally, job: Applied, client: str) -> str:
    """The table at the end of the demo."""
    verdict = "EQUAL" if proof.equal else "DIFFERENT"
    rows = [
        ("client", client),
        ("transactions", f"{tally.committed} committed, {tally.rolled_back} rolled back, {tally.retried} retried"),
        ("clients killed", f"{tally.killed_clients} in the middle of their work"),
        ("row changes", f"{tally.row_changes} by the tellers" + (f", {job.rows} applied" if job.rows else "")),
        ("rows in the lake", ", ".join(f"{table} {count}" for table, count in proof.rows.items())),
        ("batches (cuts)", f"{proof.cuts}"),
        ("commit -> visible", f"p50 {proof.p50_seconds:.2f} s, p99 {proof.p99_seconds:.2f} s"),
        ("cut compared", f"{proof.cut_ts}"),
        ("bank total", f"{proof.expected_total} in {proof.balanced_cuts} of {len(proof.totals)} cuts"),
        ("lake = store", f"{verdict}{''.join(f'; {line}' for line in proof.differences[:5])}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
