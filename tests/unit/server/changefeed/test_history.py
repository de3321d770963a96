"""The schema changes of a changefeed: what is in force when."""

from hypothesis import given

from server.changefeed.history import History, SchemaChange
from tests.unit.server.capture.upstream import STATEMENTS, evolved, record


@given(STATEMENTS)
def test_whether_there_are_tables_is_told_without_looking_at_all(statements) -> None:
    changes = [
        SchemaChange(each.commit_ts, each.query, tuple(t.record for t in each.tables), each.dropped)
        for each in evolved(statements).changes
    ]
    for start in ((), (record("a", 1), record("b", 2))):
        history = History([SchemaChange(100, tables=start), *changes])
        for ts in range(95, history.last_ts + 10, 5):
            assert history._has_tables(ts) == bool(history.at(ts))
