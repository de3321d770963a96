"""The upstream's side: all rows of a table as they were at its cut, whatever kind of upstream it is."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from server.changefeed.info import ChangefeedInfo
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from server.verify.catalog import MYSQL, Table, scheme_of
from server.verify.upstream.mysql import MySqlUpstream
from server.verify.upstream.store import StoreUpstream
from storage.meta.meta import Meta


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that knows the changefeed."""

    pd: PdClient
    kv: KvClient
    meta: Meta


class Upstream(Protocol):
    """Tables as of their cuts; may be read any number of times, one table at a time."""

    def rows(self, table: Table) -> AsyncIterator[pa.RecordBatch]:
        """All rows, in the table's own columns."""


def open_upstream(
    cluster: Cluster, info: ChangefeedInfo, tables: Sequence[Table], *, gently: bool = False
) -> AbstractAsyncContextManager[Upstream]:
    """The upstream for the block; a slow reader that goes `gently` keeps no statement of others waiting for long.

    Raises:
        VerifyHistoryError, VerifyMovedError, VerifyBehindError: it cannot be read at the cut.
    """
    if scheme_of(info) == MYSQL:
        return MySqlUpstream.open(cluster.meta, info, tables, in_chunks=gently)
    return StoreUpstream.open(cluster.pd, cluster.kv, info, tables)
