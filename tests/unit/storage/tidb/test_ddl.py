"""DDL jobs, and what they make of the schemas."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.ddl import (
    Action,
    Job,
    SchemaKey,
    decode_schema_key,
    history_key,
    job_key,
    job_span,
)
from storage.tidb.row import encode_row
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import REMOVED, Change, SchemaHistory, Table
from tests.tidb_encoding import database_key, table_key
from tests.unit.storage.tidb import vectors

IDS = st.integers(1, 1 << 40)


def info(table_id: int, name: str, *partition_ids: int) -> dict[str, Any]:
    parts = [{"id": number, "name": {"O": f"p{number}", "L": ""}} for number in partition_ids]
    partition = {"enable": True, "definitions": parts} if parts else None
    return {
        "id": table_id,
        "name": {"O": name, "L": name},
        "cols": [],
        "pk_is_handle": False,
        "partition": partition,
    }


def job(action: int, table_id: int = 0, number: int = 0, schema_id: int = 1, **binlog: Any) -> Job:
    arguments = binlog.pop("arguments", None)
    doc: dict[str, Any] = {
        "id": number or hash((action, table_id, str(binlog))) & 0xFFFF,
        "type": action,
        "state": 4,
    }
    doc |= {
        "schema_id": schema_id,
        "table_id": table_id,
        "query": f"q{action}",
        "binlog": binlog,
        "raw_args": arguments,
    }
    return Job.parse(json.dumps(doc))


def history(*infos: dict[str, Any]) -> SchemaHistory:
    return SchemaHistory(10, {1: "a", 2: "b"}, [Table(1, "a", it) for it in infos])


def applied(state: SchemaHistory, it: Job, ts: int = 20) -> Change:
    change = state.apply(it, ts)
    assert change is not None
    return change


def names(state: SchemaHistory) -> list[str]:
    return [table.name for table in state]


@given(IDS, IDS)
def test_meta_keys_round_trip(database_id: int, table_id: int) -> None:
    assert decode_schema_key(table_key(database_id, table_id)) == SchemaKey(database_id, table_id)
    assert decode_schema_key(database_key(database_id)) == SchemaKey(database_id, 0)
    assert decode_schema_key(history_key(table_id)) is None
    assert job_span().contains(job_key(table_id))


def test_a_key_that_is_none_of_the_meta_keys_is_refused() -> None:
    with pytest.raises(CorruptError, match="not a meta key"):
        decode_schema_key(b"t\x80")


def test_the_meta_keys_of_real_ddl_are_read_and_written_alike() -> None:
    seen = set()
    for key, new in vectors.meta_changes():
        found = decode_schema_key(key) if key.startswith(b"mDB") else None
        if found is not None:
            assert (table_key(*found) if found.table_id else database_key(found.database_id)) == key
            seen.add(found)
        if key.startswith(job_span().start_key) and new is not None:
            assert job_key(Job.of_row(new).id) == key
    assert len(seen) > 20


@pytest.mark.parametrize("number", range(52))
def test_after_each_step_the_schemas_are_those_select_was_answered_with(number: int) -> None:
    state = SchemaHistory(0, {}, [])
    for step in vectors.lines("steps")[: number + 1]:
        for commit_ts, it in vectors.jobs_of(step):
            state.apply(it, commit_ts)
    expected = vectors.lines("steps")[number]
    assert names(state) == sorted(expected["rows_after"])
    for table in state:
        wanted = vectors.schema_at(table.name, expected["ts_after"])
        found = TableInfo.parse(json.dumps(table.info))
        assert (found.stored_columns, found.partition_ids) == (
            wanted.stored_columns,
            wanted.partition_ids,
        )


def test_each_real_statement_tells_what_it_did() -> None:
    state, told = SchemaHistory(0, {}, []), {}
    for step in vectors.lines("steps"):
        for commit_ts, it in vectors.jobs_of(step):
            change = state.apply(it, commit_ts)
            if change is not None:
                parts = (change.tables, change.dropped, change.truncated)
                told[it.id] = tuple([table.name for table in part] for part in parts)
    assert told[139] == (["vec.nopkuk2"], ["vec.nopkuk"], [])
    assert told[142] == (["vec2.ncs2"], ["vec.ncs"], [])
    assert told[144] == (["vec.upk"], [], ["vec.upk"])
    assert told[145] == ([], ["vec.dtpk"], [])
    assert told[160] == ([], ["vec2.ncs2"], [])
    assert told[118] == told[125] == (["vec.spk"], [], [])
    assert not {85, 141, 147, 149, 150} & told.keys()  # databases, a view, a sequence


def test_removed_partitions_are_told_with_the_ts_at_which_their_rows_went() -> None:
    state, removed = SchemaHistory(0, {}, []), {}
    for step in vectors.lines("steps"):
        for commit_ts, it in vectors.jobs_of(step):
            change = state.apply(it, commit_ts)
            for table in change.tables if change else ():
                if REMOVED in table.info:
                    assert table.info[REMOVED]["ts"] == commit_ts
                    removed[it.id] = table.info[REMOVED]["partition_ids"]
    assert removed == {134: [131], 136: [132]}


def test_partitions_are_removed_also_after_a_start_between_the_steps_of_the_job() -> None:
    between = info(7, "t", 9)
    between["partition"]["dropping_definitions"] = [{"id": 8}]
    change = applied(history(between), job(Action.DROP_PARTITION, 7, TableInfo=info(7, "t", 9)))
    assert [table.info[REMOVED] for table in change.tables] == [{"ts": 20, "partition_ids": [8]}]


def test_a_job_that_removes_partitions_is_in_force_before_it_is_done() -> None:
    for action in Action.DROP_PARTITION, Action.TRUNCATE_PARTITION, Action.OTHER:
        steps = [
            {"id": 1, "type": action, "state": 1, "schema_state": each} for each in (0, 5, 2, 1, 4)
        ]
        public = [
            Job.parse(json.dumps(step | {"schema_id": 1, "table_id": 7})).is_public
            for step in steps
        ]
        assert public == [
            False,
            False,
            False,
            action is not Action.OTHER,
            action is not Action.OTHER,
        ]


def test_a_history_that_begins_with_the_meta_keys_of_any_moment_ends_the_same() -> None:
    jobs = [pair for step in vectors.lines("steps") for pair in vectors.jobs_of(step)]
    whole = SchemaHistory(0, {}, [])
    states = [whole_state(whole)]
    for commit_ts, it in jobs:
        whole.apply(it, commit_ts)
        states.append(whole_state(whole))
    for begin in range(0, len(jobs), 5):
        ts = jobs[begin - 1][0] if begin else 0
        late = SchemaHistory.of_meta(ts, states[begin].items())
        for commit_ts, it in jobs[begin:]:
            late.apply(it, commit_ts)
        assert whole_state(late).keys() == states[-1].keys()


def whole_state(state: SchemaHistory) -> dict[bytes, bytes]:
    pairs = {
        database_key(it): json.dumps({"id": it, "db_name": {"O": name}}).encode()
        for it, name in state.databases()
    }
    for table in state:
        pairs[table_key(table.schema_id, table.id)] = json.dumps(dict(table.info)).encode()
    return pairs


def test_a_job_counts_once() -> None:
    state = history(info(7, "t"))
    truncate = job(Action.TRUNCATE_TABLE, 7, TableInfo=info(8, "t"))
    assert applied(state, truncate).truncated
    assert state.apply(truncate, 21) is None


def test_a_truncation_that_the_meta_keys_show_already_is_not_told_again() -> None:
    state = history(info(8, "t"))
    assert state.apply(job(Action.TRUNCATE_TABLE, 7, TableInfo=info(8, "t")), 20) is None
    assert names(state) == ["a.t"]


def test_a_job_that_is_not_done_changes_nothing() -> None:
    state = history()
    doc = {
        "id": 1,
        "type": 3,
        "state": 1,
        "schema_id": 1,
        "table_id": 7,
        "binlog": {"TableInfo": info(7, "t")},
    }
    assert state.apply(Job.parse(json.dumps(doc)), 20) is None
    assert not names(state)


def test_several_tables_may_be_renamed_at_once_across_databases() -> None:
    moved = [[1, 1], [2, 1], [{"O": "y"}, {"O": "x"}], [7, 8], [{"O": "a"}, {"O": "a"}]]
    in_8_4 = {
        "rename_table_infos": [
            {"table_id": 7, "new_schema_id": 2},
            {"table_id": 8, "new_schema_id": 1},
        ]
    }
    for arguments in (moved, in_8_4):
        state = history(info(7, "x"), info(8, "y"))
        infos = [info(7, "y"), info(8, "x")]
        change = applied(
            state, job(Action.RENAME_TABLES, 7, MultipleTableInfos=infos, arguments=arguments)
        )
        assert names(state) == ["a.x", "b.y"]
        assert [table.name for table in change.dropped] == ["a.y"]


def renamed(state: SchemaHistory, *steps: tuple[int, str, int]) -> Change:
    """RENAME TABLES whose steps are (table id, new name, new database), as TiDB writes its job:
    an entry a step.
    """
    infos = [info(table_id, name) for table_id, name, _ in steps]
    arguments = [
        [1] * len(steps),
        [schema_id for _, _, schema_id in steps],
        [{"O": name} for _, name, _ in steps],
        [table_id for table_id, _, _ in steps],
        [{"O": "a"}] * len(steps),
    ]
    return applied(
        state, job(Action.RENAME_TABLES, steps[0][0], MultipleTableInfos=infos, arguments=arguments)
    )


@pytest.mark.parametrize(
    ("steps", "after", "dropped"),
    [
        ([(7, "tmp", 1), (8, "x", 1), (7, "y", 1)], {7: "a.y", 8: "a.x", 9: "a.z"}, []),
        ([(7, "m", 1), (7, "n", 1)], {7: "a.n", 8: "a.y", 9: "a.z"}, ["a.x"]),
        (
            [(7, "tmp", 1), (9, "x", 1), (8, "z", 1), (7, "y", 1)],
            {7: "a.y", 8: "a.z", 9: "a.x"},
            [],
        ),
        ([(7, "tmp", 2), (8, "x", 1), (7, "y", 2)], {7: "b.y", 8: "a.x", 9: "a.z"}, ["a.y"]),
        ([(7, "_del", 1), (8, "x", 1)], {7: "a._del", 8: "a.x", 9: "a.z"}, ["a.y"]),
    ],
    ids=["swap", "chain", "cycle of three", "swap across databases", "gh-ost without a swap"],
)
def test_a_table_that_is_renamed_several_times_in_a_statement_comes_once(
    steps: list[tuple[int, str, int]], after: dict[int, str], dropped: list[str]
) -> None:
    state = history(info(7, "x"), info(8, "y"), info(9, "z"))
    change = renamed(state, *steps)
    assert len({table.id for table in change.tables}) == len(change.tables)
    assert {table.id: table.name for table in state} == after
    assert [table.name for table in change.dropped] == dropped


def test_an_exchange_of_a_partition_is_named_and_both_tables_go_on() -> None:
    state = history(info(7, "plain"), info(8, "part", 81, 82))
    change = applied(
        state,
        job(Action.EXCHANGE_PARTITION, 7, TableInfo=info(8, "part", 81, 7), arguments=[82, 1, 8]),
    )
    assert "EXCHANGE PARTITION" in change.moved
    assert {table.name for table in change.tables} == {"a.plain", "a.part"}
    plain, part = state.table(82), state.table(8)
    assert plain is not None
    assert part is not None
    assert (plain.name, part.partition_ids) == ("a.plain", (81, 7))


def test_a_recovered_table_is_named() -> None:
    assert applied(history(), job(Action.RECOVER_TABLE, 7, TableInfo=info(7, "t"))).moved


def test_a_recovered_database_is_named_and_known_from_there_on() -> None:
    """Its tables are not among what every such job tells; a job in it stopped the changefeed."""
    state = history(info(7, "t"))
    database = {"db_name": {"O": "old", "L": "old"}}
    change = applied(state, job(Action.RECOVER_SCHEMA, schema_id=9, DBInfo=database))
    assert (change.database, change.tables, bool(change.moved)) == ("old", (), True)
    made = applied(state, job(Action.CREATE_TABLE, 70, schema_id=9, TableInfo=info(70, "u")), 21)
    assert [table.name for table in made.tables] == ["old.u"]
    unnamed = applied(history(), job(Action.RECOVER_SCHEMA, schema_id=9))
    assert (bool(unnamed.moved), unnamed.database) == (True, ""), "any table may be meant"


def test_a_kind_of_ddl_that_nobody_knows_yet_is_named_for_the_tables_it_may_be_about() -> None:
    for kind in 66, 99, 200:
        for binlog in {"TableInfo": info(7, "t")}, {}:
            state = history(info(7, "t"), info(8, "u"))
            change = applied(state, job(kind, 7, **binlog))
            assert f"kind {kind}" in change.moved
            assert [table.name for table in change.tables] == ["a.t"]
    assert names(history(info(7, "t"))) == ["a.t"]
    assert history(info(7, "t")).apply(job(99, 0, schema_id=2), 20) is None, "no table is there"
    assert applied(history(info(7, "t")), job(99, 0, schema_id=77)).tables == (), "any may be meant"


def test_jobs_of_system_tables_stop_nobody() -> None:
    for kind in 29, 75, 99:
        state = SchemaHistory(10, {3: "mysql", 1: "a"}, [Table(3, "mysql", info(7, "user"))])
        assert state.apply(job(kind, 7, schema_id=3, TableInfo=info(7, "user")), 20) is None


def test_rows_that_are_imported_or_restored_are_named_once_the_table_is_back_in_use() -> None:
    state = history(info(7, "t"))
    assert not applied(state, job(75, 7, TableInfo=info(7, "t") | {"mode": 1})).moved
    back = job(75, 7, number=9, TableInfo=info(7, "t"))
    assert "IMPORT INTO" in applied(state, back, 21).moved


def test_a_repaired_table_and_one_with_soft_deletes_are_named() -> None:
    for kind in 29, 79, 80, 76:
        assert applied(history(info(7, "t")), job(kind, 7, TableInfo=info(7, "t"))).moved
    whole_database = applied(history(info(7, "t"), info(8, "u")), job(80))
    assert [table.name for table in whole_database.tables] == ["a.t", "a.u"]


def test_a_modify_is_in_force_before_the_old_column_is_gone() -> None:
    def public(state: int, step: int, kind: int = 12) -> bool:
        doc = {"id": 1, "type": kind, "state": state, "schema_state": step}
        return Job.parse(json.dumps(doc | {"schema_id": 1, "table_id": 7})).is_public

    assert [public(1, step) for step in (0, 1, 2, 3, 5)] == [False, False, False, False, True]
    assert (public(2, 5), public(3, 5), public(1, 5, kind=5)) == (False, False, False)


def test_reorganized_partitions_lose_no_rows() -> None:
    change = applied(history(info(7, "t", 71, 72)), job(64, 7, TableInfo=info(7, "t", 73, 74)))
    assert REMOVED not in change.tables[0].info


def test_partitioning_a_table_gives_it_another_id_under_its_name() -> None:
    state = history(info(7, "t"))
    change = applied(state, job(71, 7, TableInfo=info(9, "t", 91, 92)))
    assert (names(state), change.dropped, state.table(7)) == (["a.t"], (), None)


def test_system_tables_and_views_are_not_told() -> None:
    state = SchemaHistory(10, {3: "mysql", 1: "a"}, [])
    assert (
        state.apply(job(Action.CREATE_TABLE, 7, schema_id=3, TableInfo=info(7, "user")), 20) is None
    )
    assert state.apply(job(21, 8, TableInfo=info(8, "v") | {"view": {}}), 21) is None
    assert not names(state)
    assert state.table(7) is not None


def test_a_job_in_an_unknown_database_says_that_one_was_missed() -> None:
    with pytest.raises(CorruptError, match="database 9"):
        history().apply(job(Action.CREATE_TABLE, 7, schema_id=9, TableInfo=info(7, "t")), 20)


def test_jobs_do_not_go_back() -> None:
    with pytest.raises(CorruptError, match="known up to 10"):
        history().apply(job(Action.CREATE_TABLE, 7, TableInfo=info(7, "t")), 9)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"id": 1}', b'{"id": "x", "type": 1}', b"null"]
)
def test_garbage_is_not_taken_for_a_job(text: bytes) -> None:
    with pytest.raises(CorruptError, match="not a DDL job"):
        Job.parse(text)


def test_a_row_without_a_job_is_refused() -> None:
    with pytest.raises(CorruptError, match="job_meta"):
        Job.of_row(encode_row({1: b"x"}))
