"""How fast rows are decoded: `python -m tests.bench.mounter --mix bank --form v2 --rows N`;
prints one JSON line.

`v2` and `v1` mount key-value changes of that row format. `binlog` makes key-value changes of a
pump's mutations, which are mounted afterwards as `v2`: that part is not in its figure. Every second
change is an update, with both rows.
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa

from sink.tidb_mounter import TidbMounter
from storage.model.event import INSERT, UPDATE, raw_batch
from storage.tidb.cell import Value, encode_cell
from storage.tidb.field_type import Type
from storage.tidb.mutation import INSERTED, UPDATED, TableMutations
from storage.tidb.number import encode_varint
from storage.tidb.record import encode_record, record_key
from storage.tidb.schema import Column, TableInfo
from storage.tidb.time import CoreTime
from tests.tidb_encoding import encode_datum

BATCH_ROWS = 16_384
ID = Column.bigint("id")


def _columns(count: int, **fields: Any) -> list[Column]:
    return [Column(name=f"c{number}", **fields) for number in range(count)]


BANK = [Column.varchar("owner", 64), Column.bigint("balance"), Column.bigint("updated_at")]
MIXES: dict[str, list[Column]] = {
    "bank": BANK,
    "integers": _columns(10, type=Type.LONGLONG, flen=20, decimal=0),
    "texts": _columns(10, type=Type.VARCHAR, flen=64, charset="utf8mb4", collate="utf8mb4_bin"),
    "decimals": _columns(10, type=Type.NEWDECIMAL, flen=18, decimal=4),
    "times": _columns(10, type=Type.DATETIME, decimal=6),
    "doubles": _columns(10, type=Type.DOUBLE),
    "json": _columns(2, type=Type.JSON),
}


def _value(column: Column, chance: random.Random) -> Value:
    match column.type:
        case Type.VARCHAR:
            return f"owner {chance.randrange(1000)}"
        case Type.NEWDECIMAL:
            return Decimal(chance.randrange(10**12)).scaleb(-4)
        case Type.DATETIME:
            return CoreTime(
                2026, chance.randrange(1, 13), chance.randrange(1, 29), 12, 30, chance.randrange(60)
            )
        case Type.DOUBLE:
            return chance.random()
        case Type.JSON:
            return json.dumps({"a": chance.randrange(1000), "b": ["x", None, True]})
    return chance.randrange(-(10**6), 10**6)


class Rows:
    """Some random rows of one table, used over and over."""

    def __init__(self, mix: str, seed: int, distinct: int = 2048) -> None:
        self.table = TableInfo.build(101, mix, [ID, *MIXES[mix]])
        chance = random.Random(seed)
        columns = self.table.columns[1:]
        values = [
            {column.name: _value(column, chance) for column in columns} for _ in range(distinct)
        ]
        self.v2 = [encode_record(self.table, {"id": 0} | row)[1] for row in values]
        self.v1 = [b"".join(map(self._pair, columns, row.values())) for row in values]

    @staticmethod
    def _pair(column: Column, value: Value) -> bytes:
        cell = None if value is None else encode_cell(column, value)
        return b"\x08" + encode_varint(column.id) + encode_datum(column, cell)

    def changes(self, values: list[bytes], begin: int, end: int) -> pa.RecordBatch:
        """A batch of key-value changes."""
        numbers = range(begin, end)
        commit_ts, op = (
            [number // 3 + 2 for number in numbers],
            [UPDATE if it % 2 else INSERT for it in numbers],
        )
        value = [values[number % len(values)] for number in numbers]
        old = [values[(number + 1) % len(values)] if number % 2 else None for number in numbers]
        keys = [record_key(101, number) for number in numbers]
        return raw_batch(commit_ts, [ts - 1 for ts in commit_ts], op, keys, value, old)

    def mutations(self, begin: int, end: int) -> TableMutations:
        """As many changes as a pump has them, eight in a transaction."""
        found = TableMutations(self.table)
        for first in range(begin, end, 8):
            numbers = range(first, min(first + 8, end))
            rows = [(number, self.v1[number % len(self.v1)]) for number in numbers]
            keys = [b"\x08" + encode_varint(number) for number in numbers]
            inserted = [key + row for key, (it, row) in zip(keys, rows, strict=True) if not it % 2]
            updated = [
                (b"\x08\x02" + key + row) * 2
                for key, (it, row) in zip(keys, rows, strict=True)
                if it % 2
            ]
            found.add(
                first + 2,
                first + 1,
                inserted=inserted,
                updated=updated,
                deleted=[],
                sequence=[UPDATED if number % 2 else INSERTED for number in numbers],
            )
        return found


def _work(form: str, rows: Rows, count: int) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Batches, made before the clock runs, and what is measured of each."""
    mounter = TidbMounter(rows.table, "bench")
    for begin in range(0, count, BATCH_ROWS):
        end = min(count, begin + BATCH_ROWS)
        if form == "binlog":
            yield end - begin, rows.mutations(begin, end).to_batch
        else:
            batch = rows.changes(rows.v2 if form == "v2" else rows.v1, begin, end)
            yield end - begin, lambda batch=batch: mounter.mount(batch)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", choices=sorted(MIXES), default="bank")
    parser.add_argument("--form", choices=["v2", "v1", "binlog"], default="v2")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = cpu = 0.0
    for _, measured in _work(options.form, Rows(options.mix, options.seed), options.rows):
        began, cpu_began = time.perf_counter(), time.process_time()
        measured()
        seconds, cpu = seconds + time.perf_counter() - began, cpu + time.process_time() - cpu_began
    print(
        json.dumps(
            {
                "name": "mounter",
                "mix": options.mix,
                "form": options.form,
                "rows": options.rows,
                "seed": options.seed,
                "seconds": round(seconds, 4),
                "per_s": round(options.rows / seconds),
                "per_cpu_s": round(options.rows / cpu),
                "cpu_us_per_op": round(cpu / options.rows * 1e6, 4),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
