"""A real coordinator, store and capture for the Spark tests, and a writer of key-value pairs."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.transaction import TransactionClient
from storage.tidb.schema import TableInfo
from tests.integration.capture.processes import Cluster, Reader


def write(cluster: Cluster, *transactions: Mapping[bytes, bytes | None]) -> int:
    """One transaction after another, None deletes; returns the last commit_ts."""

    async def written() -> int:
        async with TransactionClient.open(cluster.pd) as client:
            for pairs in transactions:
                transaction = await client.begin()
                for key, value in pairs.items():
                    await (
                        transaction.delete(key) if value is None else transaction.put(key, value)
                    )
                commit_ts = await transaction.commit()
        return commit_ts

    return asyncio.run(written())


def create(
    cluster: Cluster,
    changefeed: str,
    tables: Iterable[tuple[str, TableInfo]],
    sink_uri: str = "",
    **more: int,
) -> int:
    """A changefeed of the tables (database, schema), with more members of its request; returns its
    start_ts.
    """
    documents = [
        pb.Table(schema_name=database, table_info_json=table.to_json())
        for database, table in tables
    ]
    request = pb.CreateChangefeedRequest(
        id=changefeed, sink_uri=sink_uri or "none:///", tables=documents, **more
    )
    return cluster.api("CreateChangefeed", request).changefeed.start_ts


def flight(cluster: Cluster) -> str:
    """The option `endpoint`."""
    return f"grpc://{cluster.capture.endpoints['flight']}"


@contextmanager
def changefeed(
    cluster: Cluster,
    name: str,
    tables: Iterable[tuple[str, TableInfo]],
    sink_uri: str = "",
    **more: int,
):
    """A changefeed for the block: its reader and its start."""
    start_ts = create(cluster, name, tables, sink_uri, **more)
    try:
        yield Reader(cluster, name), start_ts
    finally:
        cluster.api("RemoveChangefeed", pb.RemoveChangefeedRequest(id=name))


def tables_file(path: Path, tables: Iterable[tuple[str, TableInfo]]) -> Path:
    """What `tidemark cli changefeed create --tables` takes."""
    path.write_text(
        json.dumps(
            [{"schema_name": name, "table_info": json.loads(t.to_json())} for name, t in tables]
        )
    )
    return path
