"""The changefeeds' records in the metadata, written by the owner only.

Every write is fenced: it is done only while the owner key is the one this capture was elected with, so a deposed owner
that does not know it yet changes nothing.
"""

from collections.abc import Mapping, Sequence

from server.capture import keys
from server.capture.changefeed import ChangefeedInfo, checkpoint_of, status_json
from server.capture.errors import ChangefeedExistsError, NotOwnerError
from storage.meta.meta import Compare, Delete, Meta, Op, Put

_OPS_MAX = 100  # etcd takes 128 in a transaction


class Records:
    """`fence` is the create revision of the owner key, as `Meta.campaign` gave it."""

    def __init__(self, meta: Meta) -> None:
        self.fence = 0
        self._meta = meta

    async def load(self) -> list[tuple[ChangefeedInfo, int]]:
        """All changefeeds with their checkpoint_ts.

        Raises:
            CorruptError: a record cannot be read.
        """
        infos = await self._meta.get_prefix(keys.INFOS)
        statuses = await self._meta.get_prefix(keys.STATUSES)
        checkpoints = {pair.key.removeprefix(keys.STATUSES): checkpoint_of(pair.value) for pair in statuses}
        loaded = [(pair.key.removeprefix(keys.INFOS), ChangefeedInfo.from_json(pair.value)) for pair in infos]
        return [(info, checkpoints.get(name, info.start_ts)) for name, info in loaded]

    async def create(self, info: ChangefeedInfo) -> None:
        """Write a new changefeed, whose checkpoint is its start_ts. Durable.

        Raises:
            ChangefeedExistsError: the id is taken.
            NotOwnerError: another capture owns the changefeeds by now.
        """
        key = keys.info(info.id)
        puts = [Put(key, info.to_json()), Put(keys.status(info.id), status_json(info.start_ts))]
        if not (await self._meta.txn([self._fenced(), Compare.absent(key)], puts)).succeeded:
            if await self._meta.get(key):
                raise ChangefeedExistsError(f"changefeed {info.id} exists already; choose another id or remove it")
            raise _deposed()

    async def save(self, checkpoints: Mapping[str, int], infos: Mapping[str, ChangefeedInfo]) -> None:
        """Write checkpoints and records of changefeeds that exist. Durable.

        Raises:
            NotOwnerError: another capture owns the changefeeds by now.
        """
        puts = [Put(keys.status(changefeed), status_json(ts)) for changefeed, ts in checkpoints.items()]
        puts += [Put(keys.info(changefeed), info.to_json()) for changefeed, info in infos.items()]
        for start in range(0, len(puts), _OPS_MAX):
            await self._write(puts[start : start + _OPS_MAX])

    async def remove(self, changefeed: str) -> None:
        """Delete a changefeed. Durable; raises as `save`."""
        await self._write([Delete(keys.info(changefeed)), Delete(keys.status(changefeed))])

    async def _write(self, ops: Sequence[Op]) -> None:
        if not (await self._meta.txn([self._fenced()], ops)).succeeded:
            raise _deposed()

    def _fenced(self) -> Compare:
        return Compare.created_at(keys.OWNER, self.fence)


def _deposed() -> NotOwnerError:
    return NotOwnerError("another capture owns the changefeeds by now; ask again")
