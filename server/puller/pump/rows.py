"""Transactions of pumps as changes of tables: mutations are gathered by table,
then translated together.

What is made of a run of transactions depends on nothing but them and the tables in force.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from tipb import binlog_pb2

from server.changefeed.table import SourceTable
from server.puller.pump.merge import BinlogInvalidError, Transaction
from server.puller.tidb.table import part_spans
from sink.mounter import whole_mounter
from sink.tidb_mounter import TidbMounter
from storage.model.errors import CorruptError
from storage.model.span import Span
from storage.tidb.mutation import TableMutations
from storage.tidb.record import record_prefix
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import SchemaHistory

BATCH_ROWS = 16_384


class TableUnknownError(CorruptError):
    """A binlog has rows of a table that no schema change brought."""

    code = "ErrBinlogTableUnknown"


class Tables:
    """The tables of a changefeed by TiDB's ids, and whether an id is one of a table that it does
    not take.
    """

    def __init__(self, history: SchemaHistory, tables: Sequence[SourceTable]) -> None:
        self.history = history
        self._taken = {int(table.record.table_info["id"]): table for table in tables}

    @property
    def spans(self) -> list[Span]:
        """Where rows go."""
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
