"""The lake's benchmark: `python -m tests.bench.lake --target T --batch-rows N`, the real job against computed rows.

Without `--rate` all rows are there at once and each cut takes N of them: `rows_per_s` is what the target can take, p50
and p99 are the time of a cut. With `--rate R` rows commit at that pace and p50 and p99 are commit to visible. The table
has `--keys` rows before; the cuts that bring these, and the first few after them (a cold JVM's), are not counted.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.bench.lake_feed import TABLE, TXN_ROWS, BenchFeed
from tests.mariadb import running_mariadb
from tests.postgres import running_postgres

TARGETS = ("noop", "parquet", "delta", "iceberg", "jdbc", "mysql")
_TICK_S = 0.05


@contextlib.contextmanager
def target_uri(target: str, directory: Path) -> Iterator[str]:
    """An empty target of that kind."""
    if target == "jdbc":
        with running_postgres() as server:
            yield server.create("lake")
    elif target == "mysql":
        with running_mariadb() as maria:
            yield f"{maria.uri}/{maria.database('lake')}"
    else:
        yield f"{target}://{directory}/lake"


def applied(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job; returns its figures."""
    loaded = -(-arguments.keys // TXN_ROWS)
    warm = loaded + arguments.warm_up * arguments.batch_rows // TXN_ROWS
    last = warm + arguments.batches * arguments.batch_rows // TXN_ROWS
    with target_uri(arguments.target, directory) as uri, BenchFeed(arguments.keys) as feed:
        if arguments.rate:
            feed.resolve(loaded)
        else:
            feed.resolve(last)
        command = [sys.executable, "-m", "pyspark_tidemark.job", "--endpoint", feed.uri, "--changefeed", "bench"]
        command += ["--target", uri, "--checkpoint-dir", str(directory / "checkpoint"), "--trigger", "0 seconds"]
        command += ["--max-rows-per-trigger", str(arguments.batch_rows), "--until-ts", str(feed.ts(last))]
        command += ["--mode", arguments.mode] if arguments.mode else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            cuts = []
            for line in process.stdout:
                found = json.loads(line)
                if "end_ts" not in found:
                    continue
                cuts.append(found)
                if arguments.rate and found["end_ts"] == feed.ts(loaded):
                    threading.Thread(target=pace, args=(feed, loaded, last, arguments.rate), daemon=True).start()
        if process.returncode:
            raise SystemExit(f"the job ended with status {process.returncode}")
        return figures(feed, [cut for cut in cuts if cut["end_ts"] > feed.ts(warm)], arguments.rate)


def pace(feed: BenchFeed, start: int, last: int, rate: float) -> None:
    """Commit transactions at a pace, and note when: their commit_ts are a history's, not the time of day."""
    began = time.time()
    done = start
    while done < last:
        time.sleep(_TICK_S)
        done = min(last, start + int((time.time() - began) * rate / TXN_ROWS))
        feed.committed[done] = time.time()
        feed.resolve(done)


def figures(feed: BenchFeed, cuts: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Rows a second over the counted cuts, and percentiles."""
    rows = sum(cut["rows"].get(TABLE, 0) for cut in cuts)
    visible = [datetime.fromisoformat(cut["applied_at"]).timestamp() for cut in cuts]
    seconds = visible[-1] - visible[0] + cuts[0]["seconds"]
    times = latencies(feed, cuts, visible) if rate else [cut["seconds"] for cut in cuts]
    times.sort()
    return {
        "rows": rows,
        "cuts": len(cuts),
        "rows_per_s": round(rows / seconds),
        "p50_ms": round(1000 * times[len(times) // 2]),
        "p99_ms": round(1000 * times[min(len(times) - 1, len(times) * 99 // 100)]),
    }


def latencies(feed: BenchFeed, cuts: list[dict[str, Any]], visible: list[float]) -> list[float]:
    """Seconds from commit to visible, of each group of transactions that committed together."""
    found = []
    for transaction, committed in sorted(feed.committed.items()):
        seen = next((at for cut, at in zip(cuts, visible, strict=True) if cut["end_ts"] >= feed.ts(transaction)), None)
        first = cuts[0]["start_ts"]
        if seen is not None and feed.ts(transaction) > first:
            found.append(max(0.0, seen - committed))
    return found


def read(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Spark reads each batch and throws it away."""
    from pyspark_tidemark.lake.session import open_session

    spark = open_session(master="local[2]", driver_memory="1g", directory=directory, lake="parquet", extra={})
    transactions = arguments.batch_rows // TXN_ROWS
    times = []
    with BenchFeed(arguments.keys) as feed:
        feed.resolve(transactions * (arguments.batches + arguments.warm_up))
        for number in range(arguments.batches + arguments.warm_up):
            began = time.perf_counter()
            bounds = {
                "startTs": str(feed.ts(number * transactions)),
                "endTs": str(feed.ts((number + 1) * transactions)),
            }
            options = {"endpoint": feed.uri, "changefeed": "bench", "table": TABLE} | bounds
            spark.read.format("tidemark").options(**options).load().write.format("noop").mode("append").save()
            times.append(time.perf_counter() - began)
    spark.stop()
    times = sorted(times[arguments.warm_up :])
    rows = arguments.batches * arguments.batch_rows
    p50, p99 = (round(1000 * times[min(len(times) - 1, len(times) * part // 100)]) for part in (50, 99))
    return {"rows": rows, "cuts": len(times), "rows_per_s": round(rows / sum(times)), "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--mode", default="", help="upsert, append or scd2 (default: the target's)")
    parser.add_argument("--batch-rows", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3, help="batches that are not counted")
    parser.add_argument("--keys", type=int, default=100_000, help="rows of the table")
    parser.add_argument("--rate", type=float, default=0.0, help="rows a second; 0: as fast as the target takes them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-") as directory:
        found = (read if arguments.target == "noop" else applied)(arguments, Path(directory))
    shown = {name: getattr(arguments, name) for name in ("target", "mode", "batch_rows", "keys", "rate")}
    print(json.dumps({"bench": "lake", **shown, **found}))


if __name__ == "__main__":
    main()
