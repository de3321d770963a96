"""The mounter gives what the scalar decoder gives, in Spark's types,
and numbers rows per transaction.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sink.mounter import WithBefore, schema_of
from sink.mounts import Mounting, SequenceMount
from sink.tidb_mounter import TidbMounter
from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.tidb.cell import arrow_value
from storage.tidb.datum import NIL, encode_key_datum
from storage.tidb.field_type import Flag
from storage.tidb.record import decode_record, decode_record_key, encode_record, record_key
from storage.tidb.row import decode_row, encode_row
from storage.tidb.schema import Column, Index, TableInfo
from tests.tidb_encoding import common_record_key, encode_datum
from tests.unit.storage.tidb import vectors
from tests.unit.storage.tidb.values import COLUMNS

ACCOUNTS = TableInfo.build(
    101,
    "accounts",
    [
        Column.bigint("id"),
        Column.varchar("owner", 64),
        Column.bigint("balance"),
        Column.bigint("updated_at"),
    ],
)
MOUNTER = TidbMounter(ACCOUNTS, "bank")
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.fixed_dictionaries(
    {"id": INT64},
    optional={
        "owner": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        "balance": st.none() | INT64,
        "updated_at": st.none() | INT64,
    },
)

Change = tuple[int, int, int, bytes, bytes | None, bytes | None]


def batch(changes: list[Change]) -> pa.RecordBatch:
    return raw_batch(
        *([list(column) for column in zip(*changes, strict=True)] or [[] for _ in range(6)])
    )


def scalar(table: TableInfo, change: Change) -> dict[str, Any]:
    """The table's columns of one change, by the scalar decoder, as Arrow gives them back."""
    _, _, op, key, value, old_value = change
    row = old_value if op == DELETE else value
    decoded = decode_record(table, key, row or b"")
    columns = {
        column.name: arrow_value(column, decoded[column.name]) for column in table.stored_columns
    }
    schema = TidbMounter(table, "db").schema
    return {
        name: pa.array([value], schema.field(name).type)[0].as_py()
        for name, value in columns.items()
    }


def mounted(mounter: TidbMounter, raw: pa.RecordBatch) -> list[dict[str, Any]]:
    out = mounter.mount(raw)
    out.validate(full=True)
    assert out.schema == mounter.schema
    names = [name for name in out.schema.names if not name.startswith("_")]
    return out.select(names).to_pylist()


def split(table: TableInfo, changes: list[Change]) -> list[Change]:
    """Updates that change the key as a delete and an insert; all deletes of a transaction first."""
    out: list[Change] = []
    keys = [column.name for column in table.key_columns]
    for change in changes:
        commit_ts, start_ts, op, key, value, old_value = change
        rows = (
            [decode_record(table, key, row or b"") for row in (value, old_value)]
            if op == UPDATE
            else [{}, {}]
        )
        if all(rows[0].get(name) == rows[1].get(name) for name in keys):
            out.append(change)
        else:
            out.append((commit_ts, start_ts, DELETE, key, None, old_value))
            out.append((commit_ts, start_ts, INSERT, key, value, None))
    return (
        sorted(out, key=lambda change: (change[:2], change[2] != DELETE))
        if out != changes
        else changes
    )


def test_the_schema_is_the_change_columns_and_the_tables_own_all_nullable() -> None:
    assert MOUNTER.name == "bank.accounts"
    assert MOUNTER.key_columns == ("id",)
    assert MOUNTER.schema == pa.schema(
        {
            "_op": pa.string(),
            "_commit_ts": pa.int64(),
            "_start_ts": pa.int64(),
            "_seq": pa.int64(),
            "id": pa.int64(),
            "owner": pa.string(),
            "balance": pa.int64(),
            "updated_at": pa.int64(),
        }
    )


def test_an_insert_an_update_and_a_delete_become_rows() -> None:
    key, old = encode_record(
        ACCOUNTS, {"id": -7, "owner": "Zoë", "balance": 300, "updated_at": None}
    )
    new = encode_record(ACCOUNTS, {"id": -7, "owner": "Zoë", "balance": -1, "updated_at": 5})[1]
    rows = MOUNTER.mount(
        batch(
            [
                (9, 8, INSERT, key, old, None),
                (11, 10, UPDATE, key, new, old),
                (13, 12, DELETE, key, None, new),
            ]
        )
    ).to_pylist()
    shared = {"_seq": 0, "id": -7, "owner": "Zoë"}
    assert rows == [
        {
            "_op": "insert",
            "_commit_ts": 9,
            "_start_ts": 8,
            **shared,
            "balance": 300,
            "updated_at": None,
        },
        {
            "_op": "update",
            "_commit_ts": 11,
            "_start_ts": 10,
            **shared,
            "balance": -1,
            "updated_at": 5,
        },
        {
            "_op": "delete",
            "_commit_ts": 13,
            "_start_ts": 12,
            **shared,
            "balance": -1,
            "updated_at": 5,
        },
    ]


def test_a_delete_without_old_value_has_its_key_only() -> None:
    rows = mounted(MOUNTER, batch([(2, 1, DELETE, record_key(101, 42), None, None)]))
    assert rows == [{"id": 42, "owner": None, "balance": None, "updated_at": None}]


def test_a_delete_without_old_value_is_refused_where_its_record_key_is_no_key_of_readers() -> None:
    key = Index(1, "u", (1,), unique=True, primary=False, public=True, whole=True)
    columns = tuple(replace(column, flags=Flag.NOT_NULL) for column in ACCOUNTS.columns)
    mounter = TidbMounter(TableInfo(101, "heap", columns, (key,)), "bank")
    row = encode_row({2: b"Zoe"})
    whole: Change = (2, 1, DELETE, record_key(101, 42), None, row)
    assert mounter.mount(batch([whole]))["owner"].to_pylist() == ["Zoe"]
    with pytest.raises(
        CorruptError, match=r"a delete of bank\.heap at 5 came without the row .* not hold owner"
    ):
        mounter.mount(batch([whole, (5, 4, DELETE, record_key(101, 43), None, None)]))


def clustered(collate: str, *, whole: bool = True) -> TableInfo:
    """A table that is stored by two columns of characters."""
    parts = (Column.varchar("a", 20), Column.varchar("b", 20))
    keys = [
        replace(column, id=number, offset=number - 1, flags=Flag.NOT_NULL, collate=collate)
        for number, column in enumerate(parts, 1)
    ]
    columns = (*keys, replace(Column.bigint("v"), id=3, offset=2))
    index = Index(1, "PRIMARY", (0, 1), unique=True, primary=True, public=True, whole=whole)
    unique = Index(2, "u", (0, 1), unique=True, primary=False, public=True, whole=True)
    return TableInfo(7, "t", columns, (index, unique), is_common_handle=True)


@pytest.mark.parametrize("collate", ["utf8mb4_general_ci", "utf8mb4_bin"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "a prefix of one"])
def test_characters_that_a_row_leaves_out_are_those_of_its_key(collate: str, whole: bool) -> None:
    """As in clusters without the new collations, which all were before TiDB 6.0."""
    table = clustered(collate, whole=whole)
    handle = b"".join(encode_key_datum(table.columns[0], text) for text in (b"Abc", b"x "))
    key, row = common_record_key(7, handle), encode_row({3: b"\x05"})
    if not whole:
        row = encode_row({1: b"Abcdef", 3: b"\x05"})
    changes: list[Change] = [
        (2, 1, INSERT, key, row, None),
        (4, 3, UPDATE, key, row, row),
        (6, 5, DELETE, key, None, row),
    ]
    told = {"a": "Abc" if whole else "Abcdef", "b": "x ", "v": 5}
    assert mounted(TidbMounter(table, "db"), batch(changes)) == [told, told, told]
    assert [scalar(table, change) for change in changes] == [told, told, told]


def test_a_key_alone_does_not_tell_characters_of_which_it_may_hold_the_sort_key() -> None:
    table = clustered("utf8mb4_general_ci")
    handle = b"".join(encode_key_datum(table.columns[0], text) for text in (b"\0A", b"\0B"))
    delete: Change = (6, 5, DELETE, common_record_key(7, handle), None, None)
    with pytest.raises(CorruptError, match="does not hold a"):
        TidbMounter(table, "db").mount(batch([delete]))


@pytest.mark.parametrize("op", [INSERT, UPDATE])
def test_a_change_without_its_row_is_refused(op: int) -> None:
    with pytest.raises(CorruptError, match="without a row"):
        MOUNTER.mount(batch([(2, 1, op, record_key(101, 42), None, encode_row({}))]))


def test_an_empty_batch_stays_empty() -> None:
    assert MOUNTER.mount(batch([])).num_rows == 0


@given(
    rows=st.lists(st.tuples(ROWS, st.sampled_from([INSERT, UPDATE, DELETE])), max_size=30),
    sliced=st.booleans(),
)
def test_batches_give_what_single_rows_give(
    rows: list[tuple[dict[str, Any], int]], *, sliced: bool
) -> None:
    changes: list[Change] = []
    for number, (values, op) in enumerate(rows):
        key, row = encode_record(ACCOUNTS, values)
        changes.append(
            (
                number + 2,
                number + 1,
                op,
                key,
                None if op == DELETE else row,
                None if op == INSERT else row,
            )
        )
    raw = batch(changes)
    if sliced:
        raw, changes = raw.slice(len(changes) // 2), changes[len(changes) // 2 :]
    assert mounted(MOUNTER, raw) == [scalar(ACCOUNTS, change) for change in changes]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_bytes_that_are_no_rows_are_refused_or_read_like_single_rows(rows: list[bytes]) -> None:
    changes: list[Change] = [
        (2, 1, INSERT, record_key(101, 1), b"\x80" + row, None) for row in rows
    ]
    try:
        expected = [scalar(ACCOUNTS, change) for change in changes]
    except CorruptError:
        with pytest.raises(CorruptError):
            MOUNTER.mount(batch(changes))
    else:
        assert mounted(MOUNTER, batch(changes)) == expected


def test_rows_older_than_a_column_hold_its_default() -> None:
    table = TableInfo.build(
        7,
        "t",
        [
            Column.bigint("id"),
            Column(name="z", type=Column.bigint("z").type, origin_default="5", default="6"),
        ],
    )
    raw = batch(
        [
            (2, 1, INSERT, record_key(7, n), encode_row(cells), None)
            for n, cells in enumerate([{}, {2: b"\1"}, {2: None}])
        ]
    )
    assert [row["z"] for row in mounted(TidbMounter(table, "db"), raw)] == [5, 1, None]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
def test_rows_of_a_range_are_numbered_alike_however_it_is_cut(
    sizes: list[int], data: st.DataObject
) -> None:
    _, row = encode_record(ACCOUNTS, {"id": 1})
    changes: list[Change] = [
        (10 * txn + 5, 10 * txn, INSERT, record_key(101, number), row, None)
        for txn, size in enumerate(sizes)
        for number in range(size)
    ]
    cuts = sorted({0, len(changes), *data.draw(st.lists(st.integers(0, len(changes))))})
    mount = SequenceMount(Mounting(MOUNTER.mount))
    parts = [mount(batch(changes[begin:end])) for begin, end in itertools.pairwise(cuts)]
    assert np.concatenate([np.asarray(part["_seq"]) for part in parts]).tolist() == [
        n for size in sizes for n in range(size)
    ]


def _transactions() -> Iterator[tuple[int, int, list[Change]]]:
    for step in vectors.lines("steps"):
        for txn in step["txns"] or []:
            changes: list[Change] = []
            for change in txn["kv"] or []:
                key = bytes.fromhex(change["key"])
                new, old = (change[side] and bytes.fromhex(change[side]) for side in ("new", "old"))
                if key[9:11] == b"_r" and new != old:
                    op = DELETE if new is None else INSERT if old is None else UPDATE
                    changes.append((txn["commit_ts"], txn["start_ts"], op, key, new, old))
            yield (
                txn["commit_ts"],
                txn["ddl_job_id"],
                sorted(changes, key=lambda change: (change[2], change[3])),
            )


def _by_table() -> Iterator[tuple[str, TableInfo, list[Change]]]:
    """The changes of each transaction and table, with the schema of then;
    DDL's own changes left out.
    """
    for commit_ts, job, changes in _transactions():
        for name in {} if job else sorted({name for _, name, _ in vectors.history()}):
            versions = [
                table
                for ts, table_name, table in vectors.history()
                if table_name == name and ts <= commit_ts
            ]
            ids = versions[-1].physical_ids if versions else ()
            own = [change for change in changes if decode_record_key(change[3]).table_id in ids]
            if own:
                yield name, versions[-1], own


EVERY_TYPE = TableInfo.build(5, "t", [Column.bigint("id"), *(column for column, _ in COLUMNS)])


@settings(max_examples=20)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": INT64}, optional={column.name: st.none() | values for column, values in COLUMNS}
        ),
        max_size=3,
    )
)
def test_every_type_mounts_as_its_single_rows(rows: list[dict[str, Any]]) -> None:
    changes: list[Change] = [
        (2, 1, INSERT, *encode_record(EVERY_TYPE, values), None) for values in rows
    ]
    assert mounted(TidbMounter(EVERY_TYPE, "db"), batch(changes)) == [
        scalar(EVERY_TYPE, change) for change in changes
    ]


def test_every_type_has_the_type_that_spark_reads() -> None:
    schema = TidbMounter(EVERY_TYPE, "db").schema
    assert {str(field.type) for field in schema} == {
        *("int8", "int16", "int32", "int64", "float", "double", "string", "binary"),
        *("date32[day]", "timestamp[us]", "timestamp[us, tz=UTC]", "decimal128(20, 0)"),
        *(
            f"decimal128({p}, {s})"
            for p, s in ((1, 0), (5, 5), (10, 2), (18, 9), (18, 0), (19, 4), (38, 10))
        ),
    }
    assert schema.field("decimal_65_30").type == pa.string()
    assert all(field.nullable for field in schema)


def _unclustered() -> TableInfo:
    columns = tuple(
        replace(Column.bigint(name), id=number + 1, offset=number, flags=Flag.NOT_NULL)
        for number, name in enumerate("ab")
    )
    return TableInfo(
        9,
        "t",
        columns,
        (Index(1, "PRIMARY", (0,), unique=True, primary=True, public=True, whole=True),),
    )


def test_rows_that_exchange_their_hidden_key_are_deleted_before_they_are_inserted() -> None:
    one, two = (encode_row({1: bytes((a,)), 2: b"\7"}) for a in (1, 2))
    mounter = TidbMounter(_unclustered(), "db")
    raw = batch(
        [
            (5, 4, UPDATE, record_key(9, 1), two, one),
            (5, 4, UPDATE, record_key(9, 2), one, two),
            (5, 4, INSERT, record_key(9, 3), encode_row({1: b"\3", 2: b"\7"}), None),
            (7, 6, UPDATE, record_key(9, 2), encode_row({1: b"\1", 2: b"\0"}), one),
        ]
    )
    rows = [
        (row["_commit_ts"], row["_seq"], row["_op"], row["a"])
        for row in mounter.mount(raw).to_pylist()
    ]
    assert mounter.key_columns == ("a",)
    assert rows == [
        (5, 0, "delete", 1),
        (5, 1, "delete", 2),
        (5, 2, "insert", 2),
        (5, 3, "insert", 1),
        (5, 4, "insert", 3),
        (7, 0, "update", 1),
    ]


def test_before_images_follow_rows_whose_key_changes() -> None:
    one, two, three = (encode_row({1: bytes((a,)), 2: b"\7"}) for a in (1, 2, 3))
    mounter = TidbMounter(_unclustered(), "db")
    raw = batch(
        [
            (5, 4, UPDATE, record_key(9, 1), two, one),
            (6, 5, UPDATE, record_key(9, 1), three, None),
            (7, 6, DELETE, record_key(9, 1), None, three),
        ]
    )
    mount = WithBefore(mounter)
    mounted = mount.mount(raw)
    assert mounted.schema == mount.schema == schema_of(mounter, before=True)
    assert mounted.drop_columns(["_before"]) == mounter.mount(raw)
    assert [(row["_op"], row["a"], row["_before"]) for row in mounted.to_pylist()] == [
        ("delete", 1, {"a": 1, "b": 7}),
        ("insert", 2, None),
        ("update", 3, None),  # its source did not tell
        ("delete", 3, {"a": 3, "b": 7}),
    ]
    assert mount.mount(batch([])).num_rows == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=20))
def test_key_changes_split_like_one_by_one(updates: list[tuple[int, int, int]]) -> None:
    table = _unclustered()
    changes: list[Change] = [
        (
            2 * txn + 2,
            2 * txn + 1,
            UPDATE,
            record_key(9, number),
            encode_row({1: bytes((new,))}),
            encode_row({1: bytes((old,))}),
        )
        for number, (old, new, txn) in enumerate(sorted(updates, key=lambda update: update[2]))
    ]
    expected = [scalar(table, change) for change in split(table, changes)]
    assert mounted(TidbMounter(table, "db"), batch(changes)) == expected


@vectors.needed
def test_every_change_of_a_real_tidb_mounts_as_its_single_rows() -> None:
    rows = 0
    for name, table, changes in _by_table():
        expected = [scalar(table, change) for change in split(table, changes)]
        assert mounted(TidbMounter(table, "vec"), batch(changes)) == expected, name
        rows += len(changes)
    assert rows > 5000


@vectors.needed
def test_real_rows_mount_alike_from_row_format_v1() -> None:
    for name, table, changes in _by_table():
        columns = {column.id: column for column in table.columns}
        inserts = [change for change in changes if change[2] == INSERT and change[4] is not None][
            :50
        ]
        old_form: list[Change] = []
        for commit_ts, start_ts, op, key, value, _ in inserts:
            cells = {
                column_id: cell
                for column_id, cell in decode_row(value or b"").items()
                if column_id in columns
            }
            pairs = [
                encode_datum(Column.bigint(""), bytes((column_id,)))
                + encode_datum(columns[column_id], cell)
                for column_id, cell in cells.items()
            ]
            old_form.append((commit_ts, start_ts, op, key, b"".join(pairs) or bytes((NIL,)), None))
        mounter = TidbMounter(table, "vec")
        assert mounted(mounter, batch(old_form)) == mounted(mounter, batch(inserts)), name


@vectors.needed
def test_deletes_of_real_rows_without_old_values_keep_their_key() -> None:
    for name, table, changes in _by_table():
        deletes = [change for change in changes if change[2] == DELETE]
        clustered = table.pk_is_handle or table.is_common_handle
        if not deletes or not clustered or name == "vec.cipk":  # cipk's key holds a sort key
            continue
        bare: list[Change] = [(*change[:4], None, None) for change in deletes]
        mounter = TidbMounter(table, "vec")
        keys = list(mounter.key_columns)
        assert mounter.mount(batch(bare)).select(keys) == mounter.mount(batch(deletes)).select(
            keys
        ), name
