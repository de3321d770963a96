"""The bank: two tables in TiDB's encodings; whatever happens, no transfer changes the total balance. Pure."""

import struct
from dataclasses import dataclass
from typing import Final

from storage.model.span import Span
from storage.tidb.key import decode_record_key, record_key, table_span
from storage.tidb.mysql import Flag, Type
from storage.tidb.row import decode_row, encode_row
from storage.tidb.schema import Column, TableInfo

SCHEMA: Final = "bank"
OPENING_BALANCE: Final = 1_000
_OWNER, _BALANCE, _UPDATED = 2, 3, 4
_SRC, _DST, _AMOUNT, _NOTE = 2, 3, 4, 5
_INT = struct.Struct("<q")


def _bigint(name: str, column_id: int) -> Column:
    return Column(id=column_id, name=name, type=Type.LONGLONG, flags=Flag.NOT_NULL, flen=20, decimal=0)


def _varchar(name: str, column_id: int) -> Column:
    return Column(
        id=column_id, name=name, type=Type.VARCHAR, flen=64, decimal=0, charset="utf8mb4", collate="utf8mb4_bin"
    )


ACCOUNTS: Final = TableInfo.build(
    101, "accounts", [_bigint("id", 1), _varchar("owner", 2), _bigint("balance", 3), _bigint("updated_at", 4)]
)
TRANSFERS: Final = TableInfo.build(
    102,
    "transfers",
    [_bigint("id", 1), _bigint("src", 2), _bigint("dst", 3), _bigint("amount", 4), _varchar("note", 5)],
)
TABLES: Final = (ACCOUNTS, TRANSFERS)
SPANS: Final[dict[str, Span]] = {f"{SCHEMA}.{table.name}": table_span(table.id) for table in TABLES}


@dataclass(frozen=True, slots=True)
class Bank:
    """A bank with accounts 1 … `accounts`, each opened with OPENING_BALANCE."""

    accounts: int

    @property
    def total(self) -> int:
        """The sum of all balances, at any cut."""
        return self.accounts * OPENING_BALANCE

    def account_key(self, account: int) -> bytes:
        """Where the account's row lives."""
        return record_key(ACCOUNTS.id, account)

    def account_row(self, account: int) -> bytes:
        """The row of a new account."""
        return encode_row({_OWNER: f"owner {account}".encode(), _BALANCE: _cell(OPENING_BALANCE), _UPDATED: _cell(0)})

    def moved(self, row: bytes, change: int, stamp: int) -> bytes:
        """The account's row after `change` was added to its balance; `stamp` names the transfer."""
        cells = decode_row(row)
        balance = _value(cells[_BALANCE]) + change
        return encode_row({**cells, _BALANCE: _cell(balance), _UPDATED: _cell(stamp)})

    def transfer_key(self, transfer: int) -> bytes:
        """Where the transfer's row lives."""
        return record_key(TRANSFERS.id, transfer)

    def transfer_row(self, source: int, target: int, amount: int) -> bytes:
        """The row that records a transfer; every seventh has no note."""
        note = None if amount % 7 == 0 else f"{amount} from {source} to {target}".encode()
        return encode_row({_SRC: _cell(source), _DST: _cell(target), _AMOUNT: _cell(amount), _NOTE: note})

    def values(self, key: bytes, row: bytes) -> tuple[object, ...]:
        """The columns of a stored row, in the table's order; decoded here, without the mounter that is to be proved."""
        record, cells = decode_record_key(key), decode_row(row)
        if record.table_id == ACCOUNTS.id:
            return record.handle, _text(cells[_OWNER]), _value(cells[_BALANCE]), _value(cells[_UPDATED])
        return record.handle, _value(cells[_SRC]), _value(cells[_DST]), _value(cells[_AMOUNT]), _text(cells[_NOTE])


def _cell(value: int) -> bytes:
    """An integer as row format v2 holds it: the fewest of 1, 2, 4, 8 little-endian bytes."""
    for width in (1, 2, 4):
        if -(1 << (8 * width - 1)) <= value < 1 << (8 * width - 1):
            return value.to_bytes(width, "little", signed=True)
    return _INT.pack(value)


def _value(cell: bytes | None) -> int:
    return int.from_bytes(cell or b"", "little", signed=True)


def _text(cell: bytes | None) -> str | None:
    return None if cell is None else cell.decode()
