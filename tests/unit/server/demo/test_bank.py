"""The bank's rows are TiDB rows, and no transfer changes the total."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from server.demo.bank import ACCOUNTS, OPENING_BALANCE, SCHEMA, TABLES, Bank
from sink.tidb_mounter import TidbMounter
from storage.model.event import INSERT, raw_batch
from storage.tidb.schema import TableInfo


def mounted(key: bytes, row: bytes) -> dict[str, object]:
    raw = raw_batch([10], [9], [INSERT], [key], [row], [None])
    batch: pa.RecordBatch = TidbMounter(ACCOUNTS, SCHEMA).mount(raw)
    found: dict[str, object] = batch.to_pylist()[0]
    return found


@given(st.integers(1, 1 << 40), st.integers(-(1 << 50), 1 << 50), st.integers(0, 1 << 55))
def test_a_moved_balance_is_what_the_mounter_reads(account, change, stamp):
    bank = Bank(1 << 41)
    key = bank.account_key(account)
    row = bank.moved(key, bank.new_account(account), change, stamp)
    found = mounted(key, row)
    assert (found["id"], found["balance"], found["updated_at"]) == (
        account,
        OPENING_BALANCE + change,
        stamp,
    )
    assert found["owner"] == f"owner {account}"


def test_the_tables_survive_their_json():
    for table in TABLES.values():
        assert TableInfo.parse(table.to_json()) == table
