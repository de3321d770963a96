"""The proof: at the newest cut, what Spark reads from the lake is what a foreign client reads from
the store.

The two sides share no code of ours but the bank itself: the lake is read by Spark, the store by the
client at exactly the cut's timestamp, and rows are compared as plain tuples.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from server.demo import bank as tables
from server.demo.bank import Bank
from server.demo.client import BankClient
from server.demo.cluster import json_line, open_process
from server.demo.lake import Lake

Row = tuple[object, ...]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared, and what came out."""

    cut_ts: int
    cuts: int
    rows: dict[str, int]
    totals: list[int]
    expected_total: int
    differences: list[str]
    p50_seconds: float
    p99_seconds: float

    @property
    def balanced_cuts(self) -> int:
        """The number of cuts in which the bank's total is right."""
        return sum(total == self.expected_total for total in self.totals)

    @property
    def equal(self) -> bool:
        """Whether every row agrees and every cut is balanced."""
        return not self.differences and self.balanced_cuts == len(self.totals) > 0


async def prove(bank: Bank, client: BankClient, lake: Lake, since_ts: int, log: Path) -> Proof:
    """Compare the lake with the store at the lake's newest cut;
    latencies are of transfers after `since_ts`.

    Raises:
        ProcessFailedError: Spark could not read the lake; `log` says why.
    """
    with tempfile.TemporaryDirectory(prefix="tidemark-proof-") as directory:
        arguments = [lake.format, str(lake.path), str(since_ts), directory]
        async with open_process("server.demo.lake_reader", arguments, log) as process:
            answer = await json_line(process, log)
        lake_rows = {name: _lake_rows(Path(directory) / f"{name}.arrow") for name in tables.SPANS}
    differences: list[str] = []
    for name, span in tables.SPANS.items():
        pairs = await client.scan(span.start_key, span.end_key, answer["cut_ts"])
        differences += _differences(
            name, lake_rows[name], [tables.values(key, row) for key, row in pairs.items()]
        )
    return Proof(
        cut_ts=answer["cut_ts"],
        cuts=answer["cuts"],
        rows={name: len(rows) for name, rows in lake_rows.items()},
        totals=answer["totals"],
        expected_total=bank.total,
        differences=differences,
        p50_seconds=answer["p50_seconds"],
        p99_seconds=answer["p99_seconds"],
    )


def _lake_rows(path: Path) -> list[Row]:
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _differences(name: str, lake: Iterable[Row], store: Iterable[Row]) -> list[str]:
    """What only one side has; a row that is there twice differs, too."""
    in_lake, in_store = sorted(lake, key=repr), sorted(store, key=repr)
    if in_lake == in_store:
        return []
    only_lake, only_store = set(in_lake) - set(in_store), set(in_store) - set(in_lake)
    shown = [f"{name}: only in the lake {row}" for row in sorted(only_lake, key=repr)[:_SHOWN]]
    shown += [f"{name}: only in the store {row}" for row in sorted(only_store, key=repr)[:_SHOWN]]
    return shown or [
        (
            f"{name}: {len(in_lake)} rows in the lake, {len(in_store)} in the store: some are there "
            "twice"
        )
    ]
