"""The bank: two tables in TiDB's encodings; whatever happens,
no transfer changes the total balance. Pure.
"""

from dataclasses import dataclass
from typing import Final

from storage.model.span import Span
from storage.tidb.cell import Value
from storage.tidb.record import (
    decode_record,
    decode_record_key,
    encode_record,
    record_key,
    table_span,
)
from storage.tidb.schema import Column, TableInfo

SCHEMA: Final = "bank"
OPENING_BALANCE: Final = 1_000

ACCOUNTS: Final = TableInfo.build(
    101,
    "accounts",
    [
        Column.bigint("id"),
        Column.varchar("owner", 64),
        Column.bigint("balance"),
        Column.bigint("updated_at"),
    ],
)
TRANSFERS: Final = TableInfo.build(
    102,
    "transfers",
    [
        *(Column.bigint("id"), Column.bigint("src"), Column.bigint("dst"), Column.bigint("amount")),
        Column.varchar("note", 64),
    ],
)
TABLES: Final = {table.id: table for table in (ACCOUNTS, TRANSFERS)}
ACCOUNTS_NAME: Final = f"{SCHEMA}.{ACCOUNTS.name}"
TRANSFERS_NAME: Final = f"{SCHEMA}.{TRANSFERS.name}"
SPANS: Final[dict[str, Span]] = {
    ACCOUNTS_NAME: table_span(ACCOUNTS.id),
    TRANSFERS_NAME: table_span(TRANSFERS.id),
}
REGION_STARTS: Final = (
    SPANS[ACCOUNTS_NAME].start_key,
    record_key(ACCOUNTS.id, 512),
    SPANS[TRANSFERS_NAME].start_key,
)
"""The region bounds: each table is a region, and accounts are two, so that a transfer touches
several.
"""


@dataclass(frozen=True, slots=True)
class Bank:
    """A bank with accounts 1 … `accounts`, each opened with OPENING_BALANCE."""

    accounts: int

    @property
    def total(self) -> int:
        """The sum of all balances, at any cut."""
        return self.accounts * OPENING_BALANCE

    def account_key(self, account: int) -> bytes:
        """Return the key of the account's row."""
        return record_key(ACCOUNTS.id, account)

    def new_account(self, account: int) -> bytes:
        """The row of a new account."""
        return _row(ACCOUNTS, account, f"owner {account}", OPENING_BALANCE, 0)

    def moved(self, key: bytes, row: bytes, change: int, stamp: int) -> bytes:
        """The account's row after `change` was added to its balance; `stamp` names the transfer."""
        account, owner, balance, _ = values(key, row)
        assert isinstance(balance, int)
        return _row(ACCOUNTS, account, owner, balance + change, stamp)

    def transfer_key(self, transfer: int) -> bytes:
        """Return the key of the transfer's row."""
        return record_key(TRANSFERS.id, transfer)

    def new_transfer(self, transfer: int, source: int, target: int, amount: int) -> bytes:
        """The row that records a transfer; every seventh has no note."""
        note = None if amount % 7 == 0 else f"{amount} from {source} to {target}"
        return _row(TRANSFERS, transfer, source, target, amount, note)


def values(key: bytes, row: bytes) -> tuple[Value, ...]:
    """The columns of a stored row of the bank, in its table's order."""
    return tuple(decode_record(TABLES[decode_record_key(key).table_id], key, row).values())


def _row(table: TableInfo, *columns: Value) -> bytes:
    named = {column.name: value for column, value in zip(table.columns, columns, strict=True)}
    return encode_record(table, named)[1]
