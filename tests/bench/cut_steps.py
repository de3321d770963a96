"""What the driver of a lake job does with the rows of a cut, without Spark, captures or a server:
`python -m tests.bench.cut_steps --rows N`.

The checksum for the manifest, the fold to the last change of each key, and a Delta file of it, in
CPU µs a row; the least of `--rounds`. Rows have twelve columns of a table in MariaDB. A dump's are
updates, each key once; with `--kind mixed` half are inserts, some updates and deletes, and a third
of the keys come more than once.
"""

import argparse
import hashlib
import json
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark_tidemark.lake.checksum import checksum
from pyspark_tidemark.lake.delta.files import Layout, written
from pyspark_tidemark.lake.fold import fold
from pyspark_tidemark.lake.schema import fitted

_BATCH_ROWS = 2_500
"""Of what a capture sends at a time."""
_MOMENT_US = 1_764_400_000_123_456
_TABLE_COLUMNS = slice(4, None)


def changes(count: int, kind: str) -> Any:
    """As they come from a capture."""
    numbers, random = np.arange(count), np.random.default_rng(1)
    ids = numbers if kind == "dump" else random.integers(0, count, count)
    ops = np.array(["update"] * count)
    if kind == "mixed":
        ops = np.array(["insert", "update", "delete"])[random.choice(3, count, p=[0.5, 0.4, 0.1])]
    cents = (numbers % 10_000 / 7).round(2)
    moments = np.full(count, _MOMENT_US) + numbers // _BATCH_ROWS
    columns = {
        "_op": pa.array(ops.tolist()),
        "_commit_ts": pa.array(np.full(count, 1 << 58)),
        "_start_ts": pa.array(np.full(count, (1 << 58) - 1)),
        "_seq": pa.array(numbers),
        "id": pa.array(ids),
        "customer": pa.array((ids % 977).astype(np.int32)),
        "amount": pa.array(cents).cast(pa.decimal128(12, 2), safe=False),
        "price": pa.array(ids * 0.25),
        "status": pa.array(["open"] * count),
        "note": pa.array(["n" * 60] * count),
        "placed": pa.array(moments, pa.timestamp("us")),
        "changed": pa.array(moments, pa.timestamp("us", "UTC")),
        "day": pa.array(np.full(count, 20_786, np.int32)).cast(pa.date32()),
        "flags": pa.array((ids % 3).astype(np.int8)),
        "weight": pa.array((ids / 3).astype(np.float32)),
        "data": pa.array([hashlib.md5(str(one).encode()).digest() for one in ids]),
    }
    whole = pa.table(columns)
    return pa.concat_tables(
        [whole.slice(first, _BATCH_ROWS) for first in range(0, count, _BATCH_ROWS)]
    )


def measured(rows: Any, directory: str) -> dict[str, float]:
    """CPU µs a row of each step, and the bytes of a row in its file."""
    found: dict[str, float] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        outcome = call()
        found[name] = (time.process_time() - began) / len(rows) * 1e6
        return outcome

    names = rows.schema.names[_TABLE_COLUMNS]
    layout = Layout(directory, rows.select(names).schema, {name: name for name in names}, {})
    step("checksum_us", lambda: checksum([rows]))
    live = step("fold_us", lambda: fold(rows, ["id"]).live)
    actions = step("file_us", lambda: written(layout, fitted(live, layout.schema)))
    found["cpu_us_per_op"] = sum(found.values())
    return found | {"file_bytes_per_row": actions[0]["add"]["size"] / len(live)}


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=("dump", "mixed"), default="dump")
    arguments = parser.parse_args()
    rows = changes(arguments.rows, arguments.kind)
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-") as directory:
        rounds = [measured(rows, directory) for _ in range(arguments.rounds)]
    best = {name: round(min(one[name] for one in rounds), 3) for name in rounds[0]}
    rss_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    shown = {"name": "cut_steps", "kind": arguments.kind, "rows": arguments.rows}
    print(json.dumps({**shown, **best, "peak_rss_mb": rss_mb}))


if __name__ == "__main__":
    main()
