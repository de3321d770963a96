"""The transactions of several pumps: merged into one order, then translated to changes of tables.
Pure.

A pump sends its transactions by commit_ts, and what it has sent up to is complete. So everything up
to the least of these positions is known, and comes out of `Merge` sorted; a transaction that two
pumps have comes out once. `batches` gathers the mutations of a run of transactions by table, and
translates those of a table together; what is made of them depends on nothing but them and the
tables in force.

Invariants of the order:
1. Nothing comes out above the lowest position, nor above the ts up to which all pumps are known
   (`take`'s limit).
2. What comes out is above what came out before.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from tipb import binlog_pb2

from server.changefeed.table import SourceTable
from server.puller.tidb.table import part_spans
from sink.mounter import whole_mounter
from sink.tidb_mounter import TidbMounter
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.model.ts import MAX_TS
from storage.tidb.mutation import TableMutations
from storage.tidb.record import record_prefix
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import SchemaHistory

BATCH_ROWS = 16_384


class BinlogInvalidError(CorruptError):
    """A pump sent something that is no committed transaction."""

    code = "ErrBinlogInvalid"


class TableUnknownError(CorruptError):
    """A binlog has rows of a table that no schema change brought."""

    code = "ErrBinlogTableUnknown"


class Transaction(NamedTuple):
    """A committed transaction, or a schema change, as its pump sent it."""

    commit_ts: int
    start_ts: int
    prewrite_value: bytes
    ddl_job_id: int
    ddl_query: bytes

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return 256 + len(self.prewrite_value) + len(self.ddl_query)


@dataclass(slots=True)
class _Lane:
    """The transactions that one pump has sent."""

    position_ts: int
    waiting: deque[Transaction] = field(default_factory=deque)
    waiting_bytes: int = 0


class Merge:
    """The pumps are known by their names."""

    def __init__(self, start_ts: int) -> None:
        self.resolved_ts = start_ts
        self._lanes: dict[str, _Lane] = {}

    def __contains__(self, pump: object) -> bool:
        return pump in self._lanes

    @property
    def names(self) -> list[str]:
        """The pumps that are read."""
        return sorted(self._lanes)

    @property
    def slowest(self) -> tuple[str, int]:
        """The pump that holds the others back, and its position; ("", MAX_TS) without pumps."""
        positions = ((lane.position_ts, name) for name, lane in self._lanes.items())
        position_ts, name = min(positions, default=(MAX_TS, ""))
        return name, position_ts

    def add(self, pump: str) -> int:
        """Wait for one more pump; returns the ts above which it has to be read."""
        assert pump not in self._lanes, f"{pump} is read already"
        self._lanes[pump] = _Lane(self.resolved_ts)
        return self.resolved_ts

    def remove(self, pump: str) -> None:
        """Stop waiting for a pump; only those of its transactions are kept that were merged
        already.
        """
        assert not self._lanes[pump].waiting, f"{pump} has sent what nobody has had"
        del self._lanes[pump]

    def position_ts(self, pump: str) -> int:
        """The ts up to which a pump has sent its binlogs."""
        return self._lanes[pump].position_ts

    def waiting_bytes(self, pump: str) -> int:
        """The bytes that pumps have sent and that were not taken yet."""
        return self._lanes[pump].waiting_bytes

    def push(self, pump: str, transaction: Transaction) -> None:
        """Take the next transaction of a pump.

        Raises:
            BinlogInvalidError: it is not above what the pump sent before.
        """
        lane = self._lanes[pump]
        if transaction.commit_ts < lane.position_ts:
            raise BinlogInvalidError(
                f"pump {pump} sent a transaction with commit_ts {transaction.commit_ts} after one "
                f"with {lane.position_ts}"
            )
        # After a stream broke, a pump may send again what has come out.
        if transaction.commit_ts > self.resolved_ts:
            lane.waiting.append(transaction)
            lane.waiting_bytes += transaction.size_bytes
        lane.position_ts = transaction.commit_ts

    def heartbeat(self, pump: str, ts: int) -> None:
        """A pump says that it has nothing more up to `ts`."""
        lane = self._lanes[pump]
        lane.position_ts = max(lane.position_ts, ts)

    def take(self, limit_ts: int, most_bytes: int) -> list[Transaction]:
        """The next transactions, about `most_bytes` of them;
        moves `resolved_ts` on to where they are complete.
        """
        upto_ts = min(limit_ts, self.slowest[1])
        taken: list[Transaction] = []
        size = 0
        for transaction in self._merged(upto_ts):
            last = taken[-1] if taken else None
            # Never between transactions of one commit_ts: `resolved_ts` could not say which of
            # them have come out.
            if size >= most_bytes and last is not None and transaction.commit_ts > last.commit_ts:
                upto_ts = last.commit_ts
                break
            # TiDB writes to another pump when one does not answer in time: both may have it.
            position = (transaction.commit_ts, transaction.start_ts)
            if last is None or (last.commit_ts, last.start_ts) != position:
                taken.append(transaction)
                size += transaction.size_bytes
        self._drop_up_to(upto_ts)
        self.resolved_ts = max(self.resolved_ts, upto_ts)
        return taken

    def _merged(self, upto_ts: int) -> Iterator[Transaction]:
        def complete(lane: _Lane) -> Iterator[Transaction]:
            return (transaction for transaction in lane.waiting if transaction.commit_ts <= upto_ts)

        return heapq.merge(
            *map(complete, self._lanes.values()),
            key=lambda transaction: (transaction.commit_ts, transaction.start_ts),
        )

    def _drop_up_to(self, upto_ts: int) -> None:
        for lane in self._lanes.values():
            while lane.waiting and lane.waiting[0].commit_ts <= upto_ts:
                lane.waiting_bytes -= lane.waiting.popleft().size_bytes


class Tables:
    """The tables of a changefeed by TiDB's ids, and whether an id is one of a table that it does
    not take.
    """

    def __init__(self, history: SchemaHistory, tables: Sequence[SourceTable]) -> None:
        self.history = history
        self._taken = {int(table.record.table_info["id"]): table for table in tables}

    @property
    def spans(self) -> list[Span]:
        """Return the spans of the taken tables."""
        return [table.span for table in self._taken.values()]

    def take(self, table: SourceTable, dropped: Sequence[str] = ()) -> None:
        """Take a table in its new form, in the place of what had its name or id before."""
        self.drop([table.name, *dropped])
        self._taken[int(table.record.table_info["id"])] = table

    def drop(self, names: Sequence[str]) -> None:
        """Remove tables by their names."""
        gone = [number for number, table in self._taken.items() if table.name in names]
        for number in gone:
            del self._taken[number]

    def of(self, table_id: int, commit_ts: int) -> SourceTable | None:
        """The table of a mutation; None: the changefeed does not take it.

        Raises:
            TableUnknownError: no schema change has brought it.
        """
        table = self._taken.get(table_id)
        # Not one that the filter leaves out: its rows would be lost in silence.
        if table is None and self.history.table(table_id) is None:
            raise TableUnknownError(
                f"the transaction committed at {commit_ts} has rows of table {table_id}, which no "
                f"schema change up to {self.history.ts} has brought: a schema change is missing; "
                "begin anew from a dump"
            )
        return table


def batches(
    transactions: Sequence[Transaction], tables: Tables
) -> Iterator[tuple[Span, pa.RecordBatch]]:
    """The changes of all transactions, table by table, in batches of RAW_SCHEMA.

    Raises:
        BinlogInvalidError, MutationError: a binlog cannot be read.
        TableUnknownError: it is of no table.
    """
    by_table: dict[int, tuple[Span, TableMutations]] = {}
    for transaction in transactions:
        if not transaction.prewrite_value:
            continue
        for mutation in _mutations(transaction):
            table = tables.of(mutation.table_id, transaction.commit_ts)
            if table is None:
                continue
            if mutation.table_id not in by_table:
                by_table[mutation.table_id] = table.span, TableMutations(_info(table))
            _, mutations = by_table[mutation.table_id]
            if mutation.deleted_ids or mutation.deleted_pks:
                raise BinlogInvalidError(
                    f"table {mutation.table_id}, commit_ts {transaction.commit_ts}: deletes by "
                    "key alone, as TiDB 1.0 wrote them, are not read"
                )
            mutations.add(
                transaction.commit_ts,
                transaction.start_ts,
                inserted=mutation.inserted_rows,
                updated=mutation.updated_rows,
                deleted=mutation.deleted_rows,
                sequence=list(mutation.sequence),
            )
    # A transaction of any size was one binlog: in slices, the sorter can write while it takes.
    for span, mutations in by_table.values():
        batch = mutations.to_batch()
        for begin in range(0, batch.num_rows, BATCH_ROWS):
            yield span, batch.slice(begin, BATCH_ROWS)


def binlog_keys(table: SourceTable, keys: pa.Array) -> pa.Array:
    """Keys of the store's rows as binlogs have them:
    those of partitions stand under the table's id.
    """
    if not part_spans(table.record):
        return keys
    prefix = record_prefix(int(table.record.table_info["id"]))
    return pc.binary_replace_slice(keys, 0, len(prefix), prefix)


def _mutations(transaction: Transaction) -> Sequence[binlog_pb2.TableMutation]:
    try:
        return binlog_pb2.PrewriteValue.FromString(transaction.prewrite_value).mutations
    except DecodeError as err:
        raise BinlogInvalidError(
            f"the rows of the transaction committed at {transaction.commit_ts} cannot be read: "
            f"{transaction.prewrite_value[:64].hex()}"
        ) from err


def _info(table: SourceTable) -> TableInfo:
    mounter = whole_mounter(table.mounter)
    assert isinstance(mounter, TidbMounter), "tables of TiDB are mounted by its mounter"
    return mounter.table
