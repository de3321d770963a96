"""A small upstream for the Spark tests: seeded histories of two tables,
and what they amount to at any commit_ts.
"""

import random
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

ENVELOPE = [
    ("_op", pa.string()),
    ("_commit_ts", pa.int64()),
    ("_start_ts", pa.int64()),
    ("_seq", pa.int64()),
]
ACCOUNTS = pa.schema(
    [
        *ENVELOPE,
        ("id", pa.int64()),
        ("owner", pa.string()),
        ("balance", pa.int64()),
        ("updated_at", pa.int64()),
    ]
)
KINDS = pa.schema(
    [
        *ENVELOPE,
        ("k1", pa.string()),
        ("k2", pa.decimal128(20, 0)),
        ("amount", pa.decimal128(12, 2)),
        ("at", pa.timestamp("us")),
        ("seen", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("raw", pa.binary()),
    ]
)
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


@dataclass
class Table:
    """A table's history, in commit order."""

    name: str
    key: list[str]
    schema: Any
    rows: list[dict[str, Any]] = field(default_factory=list)
    later: list[tuple[int, Any]] = field(default_factory=list)
    """(ts, schema of the rows above it) of each schema change."""

    def schema_at(self, ts: int, *, before: bool = False) -> Any:
        """Of the rows above `ts`; with their rows before, if asked."""
        schema = next(
            (schema for from_ts, schema in reversed(self.later) if from_ts <= ts), self.schema
        )
        if not before:
            return schema
        return schema.append(pa.field("_before", pa.struct(list(schema)[len(ENVELOPE) :])))

    def between(self, start_ts: int, end_ts: int) -> list[dict[str, Any]]:
        return [row for row in self.rows if start_ts < row["_commit_ts"] <= end_ts]

    def state(self, ts: int) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The replay: each living key's columns at `ts`."""
        held: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.between(0, ts):
            key = tuple(row[name] for name in self.key)
            if row["_op"] == "delete":
                del held[key]
            else:
                held[key] = {
                    name: value
                    for name, value in row.items()
                    if name not in ("_op", "_start_ts", "_seq")
                }
        return held


class Upstream:
    """Transactions at commit_ts 10, 20, 30, …; each changes some keys of both tables."""

    def __init__(self, seed: int, *, transactions: int, keys: int = 40) -> None:
        self.accounts = Table("bank.accounts", ["id"], ACCOUNTS)
        self.kinds = Table("bank.kinds", ["k1", "k2"], KINDS)
        self.end_ts = 10 * transactions
        chosen = random.Random(seed)
        living: dict[str, set[int]] = {"bank.accounts": set(), "bank.kinds": set()}
        for number in range(1, transactions + 1):
            for table, columns in ((self.accounts, self._account), (self.kinds, self._kind)):
                for seq, key in enumerate(chosen.sample(range(keys), chosen.randint(0, 3))):
                    op = self._op(chosen, living[table.name], key)
                    envelope = {
                        "_op": op,
                        "_commit_ts": 10 * number,
                        "_start_ts": 10 * number - 5,
                        "_seq": seq,
                    }
                    table.rows.append(envelope | columns(key, number))

    @property
    def tables(self) -> dict[str, Table]:
        return {table.name: table for table in (self.accounts, self.kinds)}

    @staticmethod
    def _op(chosen: random.Random, living: set[int], key: int) -> str:
        if key not in living:
            living.add(key)
            return "insert"
        if chosen.random() < 0.3:
            living.remove(key)
            return "delete"
        return "update"

    @staticmethod
    def _account(key: int, number: int) -> dict[str, Any]:
        return {
            "id": key,
            "owner": f"o'{key}\\",
            "balance": 1000 * number + key,
            "updated_at": number,
        }

    @staticmethod
    def _kind(key: int, number: int) -> dict[str, Any]:
        at = _EPOCH + timedelta(seconds=number)
        return {
            "k1": f"key '{key % 5}'",
            "k2": Decimal(2**64 - 1 - key),
            "amount": Decimal(number) / 100,
            "at": at.replace(tzinfo=None),
            "seen": at,
            "day": date(2020, 1, 1) + timedelta(days=number % 1000),
            "raw": bytes([key, number % 256]) if number % 7 else None,
        }
