"""What audits have found, in the metadata: written where lakes are compared, by nobody's leave but the changefeed's."""

from server.capture.audit import Finding
from server.changefeed import keys
from storage.meta.meta import Compare, Delete, Meta, Op, Put


class AuditRecords:
    """Of one changefeed. Every call is durable, and does nothing where the changefeed is gone."""

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._changefeed = changefeed

    async def findings(self) -> dict[str, Finding]:
        """By table.

        Raises:
            CorruptError: a record cannot be read.
        """
        prefix = keys.audit(self._changefeed)
        pairs = [pair for pair in await self._meta.get_prefix(prefix) if pair.key != prefix]
        return {each.table: each for each in (Finding.from_json(pair.value) for pair in pairs)}

    async def found(self, finding: Finding) -> None:
        """Note it, with what was known of the table before."""
        key = keys.audit_finding(self._changefeed, finding.table)
        pair = await self._meta.get(key)
        before = None if pair is None else Finding.from_json(pair.value)
        await self._write(Put(key, finding.and_before(before).to_json()))

    async def mended(self, table: str, ts: int) -> None:
        """The table was found right as of a cut: what was found up to that is over."""
        key = keys.audit_finding(self._changefeed, table)
        pair = await self._meta.get(key)
        if pair is not None and Finding.from_json(pair.value).ts <= ts:
            await self._write(Delete(key))

    async def on_time(self, time: str) -> None:
        """All that was due had been compared at that time, RFC 3339."""
        await self._write(Put(keys.audit(self._changefeed), time.encode()))

    async def _write(self, op: Op) -> None:
        there = Compare(keys.info(self._changefeed), "version", ">", 0)
        await self._meta.txn([there], [op])
