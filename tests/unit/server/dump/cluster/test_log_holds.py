"""Tables of a log under holds: one is held, the others go on;
a schema change and a round never meet.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from server.dump.cluster.holds import HoldableLogCatalog, HoldableLogRows
from server.puller.source import TableChange
from storage.model.span import Span


@dataclass
class Table:
    name: str
    span: Span


@dataclass
class Rows:
    """Where the log's rows go."""

    executor: Any = None
    open_transactions: Any = None
    resolved: dict[Span, int] = field(default_factory=dict)

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        raise NotImplementedError

    def resolve(self, span: Span, ts: int) -> None:
        assert ts > self.resolved.get(span, 0)
        self.resolved[span] = ts


class Catalog:
    """Counts the changes that came in force."""

    def __init__(self) -> None:
        self.changes: list[TableChange] = []

    async def change(self, change: TableChange) -> None:
        self.changes.append(change)


ONE, OTHER, NEW = (
    Table(name, Span(number, b"%d" % number, b"%dz" % number)) for number, name in enumerate("abc")
)


def log_of(*tables: Table) -> tuple[HoldableLogRows, HoldableLogCatalog, Rows, Catalog]:
    rows, catalog = Rows(), Catalog()
    given: Any = tables
    held = HoldableLogRows(given, 10, rows)
    wrapped: Any = catalog
    return held, HoldableLogCatalog(wrapped, held), rows, catalog


def names(held: HoldableLogRows) -> dict[int, str]:
    return {table_id: each.table.name for table_id, each in held.held.all().items()}


def change(ts: int, *tables: Table, dropped: tuple[str, ...] = ()) -> TableChange:
    given: Any = tables
    return TableChange(ts, "", given, dropped)


def test_only_the_held_table_waits() -> None:
    held, _, rows, _ = log_of(ONE, OTHER)
    held.held.all()[0].rows.hold_below(15)
    for span in (ONE.span, OTHER.span, NEW.span):
        held.resolve(span, 20)
    assert rows.resolved == {ONE.span: 14, OTHER.span: 20, NEW.span: 20}
    held.held.all()[0].rows.let_go()
    assert rows.resolved[ONE.span] == 20


async def test_a_schema_change_waits_for_the_round_under_way_and_the_next_finds_the_tables_after_it() -> (
    None
):
    held, catalog, _, changed = log_of(ONE, OTHER)
    generations = {table_id: each.generation for table_id, each in held.held.all().items()}
    async with asyncio.TaskGroup() as tasks:
        async with held.held.all()[1].rounds:
            waiting = tasks.create_task(catalog.change(change(30, NEW, dropped=("a",))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            assert changed.changes == []
        await waiting
    assert names(held) == {1: "b", 2: "c"}
    assert held.held.ends == 1
    assert held.held.all()[1].generation == generations[1]
    assert held.held.all()[2].rows.resolved_ts == 30


async def test_a_table_in_a_new_form_keeps_its_hold_and_one_with_another_span_begins_anew() -> None:
    held, catalog, _, _ = log_of(ONE, OTHER)
    rows = held.held.all()[0].rows
    await catalog.change(change(30, Table("renamed", ONE.span), dropped=("a",)))
    assert held.held.all()[0].rows is rows
    assert held.held.ends == 0
    await catalog.change(change(40, Table("renamed", NEW.span)))
    assert names(held) == {1: "b", 2: "renamed"}
    assert held.held.ends == 1
