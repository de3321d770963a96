"""Schema changes dealt to workers: together they have the tables of the whole at each ts,
and each only its own.
"""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tidemarkpb.v1 import changefeed_pb2
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.worker import wire
from server.capture.worker.combined import changes_by_worker
from tests.unit.server.capture.upstream import (
    START,
    STATEMENTS,
    Database,
    FakeSource,
    Metadata,
    evolved,
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


@settings(deadline=None, max_examples=80)
@given(STATEMENTS, st.lists(st.integers(0, 2), min_size=20, max_size=20), st.integers(0, 12))
def test_the_shares_together_have_the_tables_of_the_whole(statements, owners, known):
    def owner(span):
        return owners[span.table_id % len(owners)]

    async def run():
        database = evolved(statements)
        metadata = Metadata()
        await metadata.begin(Database())
        whole = await metadata.catalog(START, rules=("*.*",))
        began = whole.tables
        for change in database.changes[:known]:
            await whole.change(change)
        early = [changes_by_worker(whole, ddl, owner) for ddl in whole.versions.ddls(START + 1)]
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
            for worker, part in changes_by_worker(whole, ddl, owner).items():
                message = pb.ShareChange.FromString(wire.change_message(part).SerializeToString())
                for _ in range(2):
                    await shares[worker].change(wire.change_of(message, FakeSource()))
        for ts in range(START, database.ts + 11, 10):
            parts = [shown(share, ts) for share in shares.values()]
            assert set().union(*parts) == shown(whole, ts)
            assert sum(map(len, parts)) == len(shown(whole, ts))
            assert all(
                owner(table.span) == worker
                for worker, share in shares.items()
                for table in share.at(ts)
            )

    asyncio.run(run())
