"""Schema changes in the metadata, written by the owner only (docs/format/changefeed.md).

`schema/<changefeed>/<commit_ts>` is a change, `schema/<changefeed>/<commit_ts>/<table id>` a table
of it. A change is there when its head is: tables are written before it, in as many transactions as
they need, and those without a head are of a writer that died.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from server.changefeed import keys
from server.changefeed.history import Garbage, SchemaChange, table_json
from server.changefeed.table import TableRecord
from storage.codec import prefix_end
from storage.meta.meta import Delete, KeyValue, Meta, Op, Put
from storage.model.errors import CorruptError

OPS_MAX: Final = 100
"""etcd takes 128 in a transaction, comparisons apart."""
OPS_BYTES_MAX: Final = 1 << 20
"""etcd takes requests of 1.5 MiB."""
_THREAD_RECORDS_MIN: Final = 1000
"""A hundred thousand take ten seconds to read."""

_NO_HEAD: Final = SchemaChange(0).head_json()

Write: TypeAlias = Callable[[Sequence[Op]], Awaitable[None]]
"""A fenced transaction; raises NotOwnerError."""


class SchemaRecords:
    """The schema changes of all changefeeds; `write` is fenced by the owner key."""

    def __init__(self, meta: Meta, write: Write) -> None:
        self._meta = meta
        self._write = write

    async def load(self, changefeed: str) -> list[SchemaChange]:
        """The changes of a changefeed, ascending.

        Raises:
            CorruptError: one cannot be read.
        """
        return await loaded_changes(self._meta, changefeed)

    async def append(self, changefeed: str, change: SchemaChange) -> None:
        """Write a change.

        Durable when it returns; one that is interrupted is as if it had not begun.
        """
        # The head makes the change valid, so it is written last: tables without a head are not
        # loaded.
        await self.write_tables(changefeed, change)
        await self._write([head_put(changefeed, change)])

    async def write_tables(self, changefeed: str, change: SchemaChange) -> None:
        """Write the tables of a change whose head is to follow."""
        ts = change.commit_ts
        puts = [
            Put(_table_key(changefeed, ts, table), table_json(table)) for table in change.tables
        ]
        for part in parts(puts):
            await self._write(part)

    async def load_tables(self, changefeed: str, commit_ts: int) -> list[TableRecord]:
        """The tables of a change that `write_tables` wrote; raises as `load`."""
        pairs = await self._meta.get_prefix(_tables_prefix(changefeed, commit_ts))
        return list(SchemaChange.from_json(commit_ts, _NO_HEAD, (p.value for p in pairs)).tables)

    async def delete_tables(self, changefeed: str, commit_ts: int) -> None:
        """Forget the tables of a change whose head will not follow."""
        prefix = _tables_prefix(changefeed, commit_ts)
        await self._write([Delete(prefix, prefix_end(prefix))])

    async def collect(self, changefeed: str, garbage: Garbage) -> None:
        """Delete records that no reader needs any more."""
        # Heads go last: tables whose head is gone are not loaded, so nobody would ever collect
        # them.
        for part in parts(
            Delete(_table_key(changefeed, ts, table)) for ts, table in garbage.tables
        ):
            await self._write(part)
        for part in parts(Delete(keys.schema_change(changefeed, ts)) for ts in garbage.changes):
            await self._write(part)


async def loaded_changes(meta: Meta, changefeed: str) -> list[SchemaChange]:
    """See `SchemaRecords.load`; anybody may read them."""
    pairs = await meta.get_prefix(keys.schemas(changefeed))
    if len(pairs) < _THREAD_RECORDS_MIN:
        return _changes(pairs, len(keys.schemas(changefeed)))
    return await asyncio.to_thread(_changes, pairs, len(keys.schemas(changefeed)))


def _changes(pairs: Sequence[KeyValue], prefix: int) -> list[SchemaChange]:
    heads, tables = _sorted_out(pairs, prefix)
    return [
        SchemaChange.from_json(ts, head, tables.get(ts, ())) for ts, head in sorted(heads.items())
    ]


def head_put(changefeed: str, change: SchemaChange) -> Put:
    """The operation that makes a change valid, when its tables are written."""
    return Put(keys.schema_change(changefeed, change.commit_ts), change.head_json())


def delete_all(changefeed: str) -> Delete:
    """Deletes all changes of a changefeed."""
    prefix = keys.schemas(changefeed)
    return Delete(prefix, prefix_end(prefix))


def delete_others(changefeed: str, commit_ts: int) -> list[Delete]:
    """Delete all changes of a changefeed but one."""
    # The keys of the change's own tables begin with its head's key and a slash: they lie between
    # the two ranges.
    prefix, kept = keys.schemas(changefeed), keys.schema_change(changefeed, commit_ts)
    return [Delete(prefix, kept), Delete(prefix_end(kept + b"/"), prefix_end(prefix))]


def parts(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """Split writes into transactions that etcd takes; a write that is too large goes alone."""
    part: list[Op] = []
    size = 0
    for op in ops:
        weight = len(op.key) + (len(op.value) if isinstance(op, Put) else 0)
        if part and (len(part) == OPS_MAX or size + weight > OPS_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(op)
        size += weight
    if part:
        yield part


def _sorted_out(
    pairs: Sequence[KeyValue], prefix: int
) -> tuple[dict[int, bytes], dict[int, list[bytes]]]:
    """Heads and tables by commit_ts."""
    heads: dict[int, bytes] = {}
    tables: dict[int, list[bytes]] = {}
    for pair in pairs:
        ts, slash, _ = pair.key[prefix:].partition(b"/")
        if not ts.isdigit():
            raise CorruptError(f"{pair.key!r} in the metadata is no schema change's key")
        if slash:
            tables.setdefault(int(ts), []).append(pair.value)
        else:
            heads[int(ts)] = pair.value
    return heads, tables


def _tables_prefix(changefeed: str, commit_ts: int) -> bytes:
    return keys.schema_change(changefeed, commit_ts) + b"/"


def _table_key(changefeed: str, commit_ts: int, table: TableRecord) -> bytes:
    return keys.schema_table(changefeed, commit_ts, int(table.table_info["id"]))
