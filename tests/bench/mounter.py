"""How fast rows are mounted: `python -m tests.bench.mounter --rows N`; prints one JSON line."""

import argparse
import json
import random
import resource
import time
from typing import Any

from sink.mounter import Mounter
from storage.model.event import INSERT, UPDATE, raw_batch
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo

BATCH_ROWS = 16_384
TABLE = TableInfo.build(
    101,
    "accounts",
    [Column.bigint("id"), Column.varchar("owner", 64), Column.bigint("balance"), Column.bigint("updated_at")],
)


def _batches(rows: int, seed: int) -> list[Any]:
    chance = random.Random(seed)
    out = []
    for begin in range(0, rows, BATCH_ROWS):
        numbers = range(begin, min(rows, begin + BATCH_ROWS))
        pairs = [
            encode_record(
                TABLE,
                {
                    "id": n,
                    "owner": f"owner {n % 1000}",
                    "balance": chance.randrange(-(10**6), 10**6),
                    "updated_at": n << 20,
                },
            )
            for n in numbers
        ]
        keys, values = zip(*pairs, strict=True)
        commit_ts, op = [n // 3 + 2 for n in numbers], [UPDATE if n % 2 else INSERT for n in numbers]
        out.append(raw_batch(commit_ts, [ts - 1 for ts in commit_ts], op, keys, values, [None] * len(numbers)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    mounter = Mounter(TABLE, "bank")
    batches = _batches(options.rows, options.seed)
    began, cpu = time.perf_counter(), time.process_time()
    rows = sum(mounter.mount(batch).num_rows for batch in batches)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(
        json.dumps(
            {
                "name": "mounter",
                "rows": rows,
                "seed": options.seed,
                "seconds": round(seconds, 4),
                "per_s": round(rows / seconds),
                "cpu_us_per_op": round(cpu / rows * 1e6, 4),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
