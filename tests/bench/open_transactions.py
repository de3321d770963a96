"""Memory of a capture's pullers while a large transaction is open: `python -m
tests.bench.open_transactions`.

A matcher is fed the prewrites of one transaction as a store sends them, and then its commits; the
changes go nowhere. `--memory-mb 0` keeps all in memory, as before there was a limit. Prints one
JSON line; `anon` is memory of our own, and RSS also counts mapped files, which the system takes
back when it needs to.
"""

import argparse
import json
import random
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
from kvproto import cdcpb_pb2 as cdcpb

from server.puller.open_transactions import OpenTransactions
from server.puller.tikv.changes import Changes
from server.puller.tikv.matcher import COMMIT, INITIALIZED, PREWRITE, Matcher
from tests.integration.store.stubs import row_key

EVENT_ROWS = 500
BATCH_BYTES = 8 << 20


def memory_mb() -> dict[str, float]:
    """This process's resident memory, all of it and without files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: round(int(fields[field].split()[0]) / 1024, 1)
        for name, field in (("rss", "VmRSS"), ("anon", "RssAnon"))
    }


def events(kind: int, rows: int, value: bytes, commit_ts: int = 0) -> Any:
    """The rows of one transaction as parsed messages."""
    for first in range(0, rows, EVENT_ROWS):
        sent = cdcpb.Event.Entries(
            entries=[
                cdcpb.Event.Row(
                    type=kind,
                    op_type=1,
                    start_ts=5,
                    commit_ts=commit_ts,
                    key=row_key(101, at),
                    value=value,
                )
                for at in range(first, min(first + EVENT_ROWS, rows))
            ]
        )
        yield cdcpb.Event.Entries.FromString(sent.SerializeToString()).entries


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    value = random.Random(1).randbytes(options.value_bytes)
    rows = (options.transaction_mb << 20) // options.value_bytes
    limit = options.memory_mb << 20
    shared = OpenTransactions(directory / "open", limit) if limit else OpenTransactions()
    most = {"rss": 0.0, "anon": 0.0}
    out_rows = [0]

    def took(batch: pa.RecordBatch) -> None:
        out_rows[0] += batch.num_rows

    def look() -> None:
        for name, now in memory_mb().items():
            most[name] = max(most[name], now)

    before = memory_mb()
    with closing(shared):
        matcher, out = Matcher(0, shared), Changes(BATCH_BYTES, took)
        matcher.apply([cdcpb.Event.Row(type=INITIALIZED)], out)
        seconds = []
        for kind, data, commit_ts in ((PREWRITE, value, 0), (COMMIT, b"", 9)):
            began, cpu = time.perf_counter(), time.process_time()
            for number, entries in enumerate(events(kind, rows, data, commit_ts)):
                matcher.apply(entries, out)
                matcher.spill_if_short()
                if number % 20 == 0:
                    look()
            look()
            seconds.append((time.perf_counter() - began, time.process_time() - cpu))
    assert out_rows[0] + len(out) == rows
    return {
        "name": "open_transactions",
        "transaction_mb": options.transaction_mb,
        "value_bytes": options.value_bytes,
        "rows": rows,
        "memory_mb": options.memory_mb,
        "before_mb": before,
        "most_mb": most,
        "prewrite_cpu_us_per_row": round(seconds[0][1] / rows * 1e6, 2),
        "commit_cpu_us_per_row": round(seconds[1][1] / rows * 1e6, 2),
        "seconds": round(sum(wall for wall, _ in seconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transaction-mb", type=int, default=600)
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument(
        "--memory-mb", type=int, default=8, help="an eighth of a quota of 64 MiB; 0: no limit"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(run(options, Path(directory))))


if __name__ == "__main__":
    main()
