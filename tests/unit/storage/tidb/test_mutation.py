"""What binlogs say of rows is what the store says."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.tidb_mounter import TidbMounter
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.tidb.mutation import DELETED, INSERTED, ROW_ID, UPDATED, MutationError, TableMutations
from storage.tidb.number import encode_varint
from storage.tidb.record import record_key, record_prefix
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import SchemaHistory
from tests.tidb_encoding import encode_datum
from tests.unit.storage.tidb import vectors

TABLE = TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")])
HIDDEN = TableInfo(8, "h", (Column.bigint("v"),))


def cells(**values: int) -> bytes:
    """Pairs of column ids (`c1=…`, the hidden row id as `h`) and signed numbers."""
    ids = {name: ROW_ID if name == "h" else int(name[1:]) for name in values}
    return b"".join(
        b"\x08" + encode_varint(ids[name]) + b"\x08" + encode_varint(value)
        for name, value in values.items()
    )


def handle(number: int) -> bytes:
    return b"\x08" + encode_varint(number)


def batch_of(
    table: TableInfo, *txns: tuple[int, Sequence[tuple[int, bytes]]]
) -> list[dict[str, Any]]:
    mutations = TableMutations(table)
    for commit_ts, rows in txns:
        parts = {
            kind: [raw for it, raw in rows if it == kind] for kind in (INSERTED, UPDATED, DELETED)
        }
        mutations.add(
            commit_ts,
            commit_ts - 1,
            inserted=parts[INSERTED],
            updated=parts[UPDATED],
            deleted=parts[DELETED],
            sequence=[kind for kind, _ in rows],
        )
    rows_: list[dict[str, Any]] = mutations.to_batch().to_pylist()
    return rows_


def insert(number: int, value: int) -> tuple[int, bytes]:
    return INSERTED, handle(number) + cells(c2=value)


def update(number: int, old: int, value: int, to: int | None = None) -> tuple[int, bytes]:
    new_number = number if to is None else to
    return UPDATED, cells(c1=number, c2=old) + cells(c1=new_number, c2=value)


def delete(number: int, old: int) -> tuple[int, bytes]:
    return DELETED, cells(c1=number, c2=old)


def row(value: int) -> bytes:
    return encode_row({2: value.to_bytes(1, "little", signed=True)})


def test_each_kind_of_row_becomes_the_stores_change() -> None:
    assert batch_of(TABLE, (10, [insert(1, 5), update(2, 6, 7), delete(3, 8)])) == [
        change(10, INSERT, 1, None, 5),
        change(10, UPDATE, 2, 6, 7),
        change(10, DELETE, 3, 8, None),
    ]


def change(
    commit_ts: int, op: int, number: int, old: int | None, new: int | None
) -> dict[str, Any]:
    return {
        "commit_ts": commit_ts,
        "start_ts": commit_ts - 1,
        "op": op,
        "key": record_key(TABLE.id, number),
        "value": None if new is None else row(new),
        "old_value": None if old is None else row(old),
    }


def test_an_update_of_the_handle_is_a_delete_and_an_insert() -> None:
    found = batch_of(TABLE, (10, [update(1, 5, 6, to=2)]))
    assert found == [change(10, DELETE, 1, 5, None), change(10, INSERT, 2, None, 6)]


def test_rows_that_exchange_their_handles_both_survive() -> None:
    found = batch_of(
        TABLE, (10, [update(1, 5, 5, to=9), update(2, 6, 6, to=1), update(9, 5, 5, to=2)])
    )
    assert found == [change(10, UPDATE, 1, 5, 6), change(10, UPDATE, 2, 6, 5)]


def test_what_a_transaction_inserts_and_deletes_is_nothing() -> None:
    assert batch_of(TABLE, (10, [insert(1, 5), update(1, 5, 6), delete(1, 6)])) == []


def test_the_same_row_in_two_transactions_is_two_changes() -> None:
    found = batch_of(TABLE, (10, [insert(1, 5)]), (20, [update(1, 5, 6)]))
    assert found == [change(10, INSERT, 1, None, 5), change(20, UPDATE, 1, 5, 6)]


def test_a_row_of_nulls_only_is_one_nil_byte() -> None:
    assert batch_of(TABLE, (10, [(INSERTED, handle(1) + b"\x00")]))[0]["value"] == encode_row({})


def test_rows_without_a_clustered_key_are_known_by_their_hidden_number() -> None:
    rows = [
        (INSERTED, handle(1) + cells(c1=5)),
        (DELETED, cells(c1=6, h=2)),
        (UPDATED, cells(c1=7, h=3) * 2),
    ]
    found = batch_of(HIDDEN, (10, rows))
    assert {it["key"] for it in found} == {record_key(8, number) for number in (1, 2, 3)}


STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "move"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(-9, 9),
    ),
    max_size=12,
)


@given(
    st.dictionaries(st.integers(0, 3), st.integers(-9, 9)),
    st.lists(STATEMENTS, min_size=1, max_size=4),
)
def test_any_transactions_give_the_net_changes(
    before: dict[int, int], txns: list[list[tuple[str, int, int, int]]]
) -> None:
    state, raw, expected = dict(before), [], []
    for number, statements in enumerate(txns):
        was, rows = dict(state), []
        for what, key, other, value in statements:
            if what == "put":
                rows.append(update(key, state[key], value) if key in state else insert(key, value))
                state[key] = value
            elif what == "delete" and key in state:
                rows.append(delete(key, state.pop(key)))
            elif what == "move" and key in state and other not in state:
                rows.append(update(key, state[key], value, to=other))
                del state[key]
                state[other] = value
        touched = {key: (was.get(key), state.get(key)) for key in range(4)}
        if rows:
            raw.append((10 * number + 10, rows))
            expected.append((10 * number + 10, touched))
    found = batch_of(TABLE, *raw)
    for commit_ts, touched in expected:
        for key, (old, new) in touched.items():
            told = [
                it
                for it in found
                if it["commit_ts"] == commit_ts and it["key"] == record_key(7, key)
            ]
            if old != new:
                assert [(it["old_value"], it["value"]) for it in told] == [
                    (None if old is None else row(old), None if new is None else row(new))
                ]
            elif told:  # a row that ends as it was may be told as an update to the same
                assert [it["op"] for it in told] == [UPDATE]
                assert told[0]["old_value"] == told[0]["value"]


def test_a_clustered_key_of_characters_stands_for_itself() -> None:
    doc = next(job for job in _infos() if job["name"]["O"] == "cipk")
    table = TableInfo.parse(json.dumps(doc))
    text = encode_datum(table.columns[0], b"ABC")
    sort_key = encode_datum(table.columns[0], b"\x00A\x00B\x00C")
    inserted = sort_key + b"\x08\x02" + text
    deleted = b"\x08\x02" + text
    keys = {
        it["key"]
        for rows in ([(INSERTED, inserted)], [(DELETED, deleted)])
        for it in batch_of(table, (10, rows))
    }
    assert keys == {record_prefix(table.id) + b"\x01ABC\x00\x00\x00\x00\x00\xfa"}


def _infos() -> list[dict[str, Any]]:
    column: dict[str, Any] = {"id": 1, "name": {"O": "s", "L": "s"}, "offset": 0, "state": 5}
    column["type"] = {
        "Tp": 15,
        "Flag": 3,
        "Flen": 20,
        "Decimal": 0,
        "Charset": "utf8mb4",
        "Collate": "utf8mb4_general_ci",
    }
    index = {
        "id": 1,
        "idx_name": {"O": "PRIMARY", "L": ""},
        "idx_cols": [{"name": {"O": "s"}, "offset": 0, "length": -1}],
    }
    index |= {"is_unique": True, "is_primary": True, "state": 5}
    head = {
        "id": 114,
        "name": {"O": "cipk", "L": "cipk"},
        "pk_is_handle": False,
        "is_common_handle": True,
    }
    return [head | {"cols": [column], "index_info": [index]}]


BAD = {
    "sequence too short": ([(INSERTED, handle(1) + cells(c2=1))], [], "sequence tells"),
    "sequence too long": ([], [INSERTED], "sequence tells"),
    "a kind of old": ([], [2], "no TiDB writes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sequence_that_does_not_fit_the_rows_is_refused(name: str) -> None:
    rows, sequence, message = BAD[name]
    with pytest.raises(MutationError, match=message):
        TableMutations(TABLE).add(
            10, 9, inserted=[it for _, it in rows], updated=[], deleted=[], sequence=sequence
        )


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        (INSERTED, b"", "without its handle"),
        (INSERTED, handle(1), "without pairs"),
        (INSERTED, b"\x02\x02a" + cells(c2=1), "no integer"),
        (INSERTED, handle(1) + b"\xff\xff", "255"),
        (UPDATED, cells(c1=1, c2=2), "without its new row"),
        (DELETED, cells(c2=2), "without id"),
        (DELETED, cells(c1=1, c2=2)[:-1], "ends within|column id"),
        (DELETED, cells(c1=1, c2=2) + cells(c2=3), "twice"),
        (DELETED, cells(c1=1, c0=2), "no column has"),
    ],
)
def test_garbage_is_refused_with_table_and_ts(kind: int, raw: bytes, message: str) -> None:
    with pytest.raises(MutationError, match=message) as caught:
        batch_of(TABLE, (10, [(kind, raw)]))
    assert "table 7" in str(caught.value)


@given(st.sampled_from([INSERTED, UPDATED, DELETED]), st.binary(max_size=40))
def test_no_bytes_end_in_anything_but_rows_or_that_error(kind: int, raw: bytes) -> None:
    with contextlib.suppress(MutationError):
        batch_of(TABLE, (10, [(kind, raw)]))


def test_every_real_transaction_mounts_to_the_same_rows_from_its_binlog_and_from_the_store() -> (
    None
):
    state, prewrites = SchemaHistory(0, {}, []), vectors.prewrites()
    compared = 0
    for step in vectors.lines("steps"):
        jobs = dict(vectors.jobs_of(step))
        for txn in step["txns"] or []:
            if txn["commit_ts"] in jobs:
                state.apply(jobs[txn["commit_ts"]], txn["commit_ts"])
            if txn["ddl_job_id"]:
                continue
            kv = _of_store(txn)
            for mutation in prewrites[txn["start_ts"]]:
                table = state.table(mutation.table_id)
                assert table is not None
                mounter = TidbMounter(TableInfo.parse(json.dumps(table.info)), table.schema_name)
                ids = table.partition_ids or (table.id,)
                stored = kv.filter(
                    pa.array(
                        [vectors.table_id(key) in ids for key in kv["key"].to_pylist()], pa.bool_()
                    )
                )
                mutations = TableMutations(mounter.table)
                mutations.add(txn["commit_ts"], txn["start_ts"], **vectors.parts(mutation))
                found, wanted = (_mounted(mounter, it) for it in (mutations.to_batch(), stored))
                if (
                    mounter.name == "vec.part"
                ):  # of partitions that are gone at the end the vectors have no rows
                    found = [it for it in found if it in wanted]
                assert found == wanted, (step["name"], mounter.name)
                compared += len(wanted)
    assert compared > 9000


def _of_store(txn: dict[str, Any]) -> pa.RecordBatch:
    changes = [
        [it[name] and bytes.fromhex(it[name]) for name in ("key", "old", "new")]
        for it in txn["kv"] or []
    ]
    rows = [it for it in changes if it[0][9:11] == b"_r"]
    ops = [DELETE if new is None else UPDATE if old is not None else INSERT for _, old, new in rows]
    commit_ts, start_ts = ([txn[name]] * len(rows) for name in ("commit_ts", "start_ts"))
    keys, old_values, values = ([it[at] for it in rows] for at in range(3))
    return raw_batch(commit_ts, start_ts, ops, keys, values, old_values)


def _mounted(mounter: TidbMounter, batch: pa.RecordBatch) -> list[str]:
    mounted = mounter.mount(batch.sort_by([("op", "ascending"), ("key", "ascending")]))
    return sorted(repr(it) for it in mounted.drop_columns(["_seq"]).to_pylist())
