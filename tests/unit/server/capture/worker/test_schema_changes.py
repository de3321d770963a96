"""Schema changes dealt to workers: together they have the tables of the whole at each ts,
and each only its own.
"""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tidemarkpb.v1 import changefeed_pb2
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.catalog import FeedCatalog
from server.capture.worker import wire
from server.capture.worker.shared_tables import changes_by_worker
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.routes import NO_ROUTES, RouteRules
from server.changefeed.terms import Terms
from storage.model.span import Span
from tests.unit.server.capture.upstream import (
    FEED,
    NAMES,
    START,
    STATEMENTS,
    Database,
    FakeSource,
    Metadata,
    SplittableSource,
    evolved,
    record,
)


def run_request(catalog, tables, changes):
    request = pb.RunRequest(
        changefeed="feed", checkpoint_ts=START, changes=map(wire.change_message, changes)
    )
    for table in tables:
        text = json.dumps(table.record.table_info)
        request.tables.append(
            changefeed_pb2.Table(schema_name=table.record.schema_name, table_info_json=text)
        )
    return pb.RunRequest.FromString(request.SerializeToString())


def shown(catalog, ts):
    return {(table.name, table.span.table_id, table.mounter.columns) for table in catalog.at(ts)}


ROTATED = RouteRules([f"s.{one}=s.{other}" for one, other in pairwise([*NAMES, NAMES[0]])])
"""Each name in the target is also one of the source."""


def routed(change, routes):
    tables = tuple(FakeSource().table(routes.of(table.record)) for table in change.tables)
    return replace(change, tables=tables)


def _names(change):
    return [name.removeprefix("s.") for name in (*change.dropped, *change.truncated)]


def readers_see(catalog, ts):
    return {(version.name, version.span.table_id) for version in catalog.versions.at(ts)}


@settings(deadline=None, max_examples=80)
@given(
    STATEMENTS,
    st.lists(st.integers(0, 2), min_size=20, max_size=20),
    st.integers(0, 12),
    st.sampled_from([NO_ROUTES, ROTATED]),
)
def test_the_shares_together_have_the_tables_of_the_whole(statements, owners, known, routes):
    def owner(span):
        return owners[span.table_id % len(owners)]

    def placed(table):
        return [(table, owner(table.span))]

    async def run():
        database = evolved(statements)
        database.changes = [routed(change, routes) for change in database.changes]
        metadata, began_with = Metadata(), Database()
        began_with.tables = {name: routes.of(each) for name, each in began_with.tables.items()}
        await metadata.begin(began_with)
        whole = await metadata.catalog(START, rules=("*.*",))
        began = whole.tables
        for change in database.changes[:known]:
            await whole.change(change)
        early = [changes_by_worker(whole, ddl, placed) for ddl in whole.versions.ddls(START + 1)]
        shares = {}
        for worker in range(3):
            request = run_request(
                whole,
                [table for table in began if owner(table.span) == worker],
                [parts[worker] for parts in early if worker in parts],
            )
            shares[worker] = wire.assignment(request, FakeSource()).catalog
        for change in database.changes[known:]:
            await whole.change(change)
            [ddl] = whole.versions.ddls(change.commit_ts)
            gone = {".".join(routes.of(record(name, 0)).target) for name in _names(change)}
            assert {*ddl.dropped, *ddl.truncated} <= gone
            for worker, part in changes_by_worker(whole, ddl, placed).items():
                message = pb.ShareChange.FromString(wire.change_message(part).SerializeToString())
                for _ in range(2):
                    await shares[worker].change(wire.change_of(message, FakeSource()))
        for ts in range(START, database.ts + 11, 10):
            seen = [readers_see(share, ts) for share in shares.values()]
            assert set().union(*seen) == readers_see(whole, ts)
            parts = [shown(share, ts) for share in shares.values()]
            assert set().union(*parts) == shown(whole, ts)
            assert sum(map(len, parts)) == len(shown(whole, ts))
            assert all(
                owner(table.span) == worker
                for worker, share in shares.items()
                for table in share.at(ts)
            )

    asyncio.run(run())


def of_whole(table):
    """A table or part as the whole has it, and which keys."""
    span = table.span
    return table.name.partition("#")[0], span.table_id, table.mounter.columns, span


def check_versions(share, whole):
    """Where a part's versions begin and end is where those of the whole do."""
    ranges = {
        versions[0].span.table_id: [(each.from_ts, each.to_ts) for each in versions]
        for versions in whole.versions.spans(0)
    }
    for versions in share.versions.spans(0):
        of_part = [(each.from_ts, each.to_ts) for each in versions]
        assert of_part == ranges[versions[0].span.table_id]


@settings(deadline=None, max_examples=80)
@given(
    STATEMENTS,
    st.lists(st.integers(0, 2), min_size=20, max_size=20),
    st.lists(st.booleans(), min_size=20, max_size=20),
    st.integers(0, 12),
)
def test_each_part_of_a_split_table_follows_its_schema_changes(
    statements, owners, are_split, known
):
    source = SplittableSource()
    split: dict[int, list[Span]] = {}

    def placed(table):
        number, span = table.span.table_id, table.span
        if not are_split[number % len(are_split)]:
            return [(table, owners[number % len(owners)])]
        middle = span.start_key + b"\x50"
        spans = [Span(number, span.start_key, middle), Span(number, middle, span.end_key)]
        split[number] = spans
        return [
            (source.part(table, part), owners[(number + place) % len(owners)])
            for place, part in enumerate(spans)
        ]

    async def kept(_):
        return

    async def run():
        database = evolved(statements)
        changes = [
            replace(each, tables=tuple(source.table(table.record) for table in each.tables))
            for each in database.changes
        ]
        start = SchemaChange(START, tables=tuple(Database().tables.values()))
        terms = Terms(FEED, TableFilter(["*.*"]))
        whole = FeedCatalog(terms, source, History([start]), START, kept)
        began = [pair for table in whole.tables for pair in placed(table)]
        for change in changes[:known]:
            await whole.change(change)
        early = [changes_by_worker(whole, ddl, placed) for ddl in whole.versions.ddls(START + 1)]
        shares = {}
        for worker in range(3):
            tables = [table for table, owner in began if owner == worker]
            parts = [of_all[worker] for of_all in early if worker in of_all]
            request = run_request(whole, tables, parts)
            shares[worker] = wire.assignment(request, source).catalog
        for change in changes[known:]:
            await whole.change(change)
            [ddl] = whole.versions.ddls(change.commit_ts)
            for worker, part in changes_by_worker(whole, ddl, placed).items():
                message = pb.ShareChange.FromString(wire.change_message(part).SerializeToString())
                for _ in range(2):
                    await shares[worker].change(wire.change_of(message, source))
        for ts in range(START, database.ts + 11, 10):
            expected = [
                (name, number, columns, span)
                for name, number, columns, whole_span in map(of_whole, whole.at(ts))
                for span in split.get(number, [whole_span])
            ]
            found = [of_whole(table) for share in shares.values() for table in share.at(ts)]
            assert sorted(found) == sorted(expected)
        for share in shares.values():
            check_versions(share, whole)

    asyncio.run(run())
