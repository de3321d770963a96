"""What a status tells of a dump: sums and shares that neither failed tables nor bad estimates make
wrong.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from server.dump.job import PAUSED, Job
from server.dump.progress import Cell, Range, TableDump, TableProgress, TableState
from server.dump.status import dump_message, table_messages

JOB = Job("j", priority={"s.first": 2, "s.*": 1})


def table(
    name: str, state: TableState, rows: int, estimated: int, rate: int = 0, read: int = 0
) -> TableProgress:
    return TableProgress(
        name,
        len(name),
        "j",
        state,
        rows=rows,
        bytes=rows * 10,
        rows_estimated=estimated,
        rows_per_s=rate,
        rows_read=read,
    )


HALF = table("s.half", TableState.DUMPING, 500, 1000, 50, 600)
DONE = table("s.done", TableState.DONE, 1500, 9999, 7)
FAILED = table("s.bad", TableState.FAILED, 3, 1_000_000, 9)


def test_sums_are_of_tables_that_count_and_a_failed_one_makes_no_share_wrong() -> None:
    for tables in ([HALF, DONE], [HALF, DONE, FAILED, table("s.gone", TableState.DROPPED, 5, 10)]):
        dump = dump_message("c", JOB, tables)
        assert (dump.rows_done, dump.rows_estimated, dump.bytes_done, dump.rows_per_second) == (
            2000,
            2500,
            20_000,
            50,
        )
        assert (dump.progress_percent, dump.eta_seconds, dump.state) == (80.0, 10, "running")
        assert (dump.tables_known, dump.tables_done, dump.tables_failed) == (
            len(tables),
            1,
            len(tables) // 4,
        )


def test_when_all_is_over_a_failed_table_is_in_the_state_and_the_rest_is_at_100() -> None:
    assert dump_message("c", JOB, [DONE]).state == "finished"
    dump = dump_message("c", JOB, [DONE, FAILED])
    assert (dump.state, dump.progress_percent, dump.eta_seconds, dump.tables_failed) == (
        "failed",
        100.0,
        0,
        1,
    )
    assert dump_message("c", JOB, []).state == "running"


def test_what_is_not_known_is_not_made_up() -> None:
    unplanned = table("s.new", TableState.WAITING, 0, 0)
    dump = dump_message("c", JOB, [HALF, unplanned])
    assert (dump.rows_estimated, dump.progress_percent, dump.eta_seconds) == (0, 0.0, -1)
    more = table("s.more", TableState.DUMPING, 2000, 1000, 50)
    (told,) = table_messages("c", JOB, [more], {})
    assert (told.progress_percent, told.eta_seconds) == (99.9, -1)
    (paused,) = table_messages("c", replace(JOB, state=PAUSED), [HALF], {})
    assert (paused.progress_percent, paused.rows_per_second, paused.eta_seconds) == (50.0, 0, -1)
    (done,) = table_messages("c", JOB, [DONE], {})
    assert (done.progress_percent, done.rows_per_second, done.eta_seconds) == (100.0, 0, 0)


def test_a_table_waits_until_those_of_greater_priority_have_been_read() -> None:
    first, later = (
        table("s.first", TableState.DUMPING, 0, 10),
        table("s.later", TableState.DUMPING, 0, 10),
    )
    told = table_messages("c", JOB, [later, first], {"s.x": ("ignored", "why")})
    assert [(each.table, each.state, each.priority) for each in told] == [
        ("s.first", "dumping", 2),
        ("s.later", "waiting", 1),
        ("s.x", "ignored", 0),
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.booleans(), st.sampled_from(TableState)), max_size=8
    )
)
def test_ranges_are_read_of_the_greatest_priority_that_has_some(
    drawn: list[tuple[str, bool, TableState]],
) -> None:
    job = Job("j", priority={"s.a*": 3, "s.b*": 2, "s.c*": 2})
    dumps = []
    for at, (name, is_read, state) in enumerate(drawn):
        ranges = (Range((Cell(1, b"1"),), done=is_read),)
        dumps.append(TableDump(TableProgress(f"s.{name}{at}", at, "j", state, ranges=ranges)))
    found = job.most_urgent(dumps)
    ready = [
        each
        for each in dumps
        if each.durable.state is TableState.DUMPING and each.next_range() is not None
    ]
    priorities = {job.priority_of(each.durable.name) for each in found}
    assert len(priorities) == bool(ready)
    rest = [each for each in ready if each not in found]
    assert all(job.priority_of(each.durable.name) < min(priorities) for each in rest)


def test_a_name_says_its_priority_before_any_pattern() -> None:
    job = Job("j", priority={"s.*": 5, "*.a": 7, "s.b": -1})
    assert [job.priority_of(name) for name in ("s.a", "s.b", "s.c", "x.y")] == [7, -1, 5, 0]
