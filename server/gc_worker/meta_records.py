"""GC's records in the metadata, etcd or PD; values are text."""

from collections.abc import Mapping

from gcsafepoint.worker.records import Record
from storage.meta.meta import Compare, Delete, Meta, Put


class MetaRecords:
    """The `gcsafepoint.worker.records.Records` of a metadata client."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    async def read(self, prefix: str) -> dict[str, Record]:
        """See `Records`."""
        pairs = await self._meta.get_prefix(prefix.encode())
        return {pair.key.decode(): Record(pair.value.decode(), pair.mod_revision) for pair in pairs}

    async def write(self, changes: Mapping[str, str | None], expect: Mapping[str, int]) -> int:
        """See `Records`."""
        compares = [Compare.unchanged(key.encode(), revision) for key, revision in expect.items()]
        ops = [
            Delete(key.encode()) if value is None else Put(key.encode(), value.encode())
            for key, value in changes.items()
        ]
        result = await self._meta.txn(compares, ops)
        return result.revision if result.succeeded else 0
