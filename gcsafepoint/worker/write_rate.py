"""gc.max-write-bytes-per-sec, brought from the metadata store to the stores, which hold Do GC to it by themselves.

Each store is told once per change, and keeps what it was told over restarts. A limit that nobody ever set here is left
to the stores' own settings.
"""

from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.listener import Listener
from gcsafepoint.worker.records import MAX_WRITE_BYTES_KEY, Settings
from storage.model.errors import TidemarkError
from storage.tasks import together


class WriteRate:
    """What one leader told which store."""

    def __init__(self, cluster: Cluster, listener: Listener) -> None:
        self._cluster = cluster
        self._listener = listener
        self._told: dict[str, int] = {}

    async def bring(self, settings: Settings) -> None:
        """Tell the stores that do not know yet; one that cannot be told is tried again at the next tick."""
        revision = settings.revisions[MAX_WRITE_BYTES_KEY]
        addresses = await self._cluster.store_addresses() if revision else ()
        await together(
            self._tell(address, settings.config.max_write_bytes_per_s, revision)
            for address in addresses
            if self._told.get(address) != revision
        )

    async def _tell(self, address: str, bytes_per_s: int, revision: int) -> None:
        try:
            await self._cluster.limit_writes(address, bytes_per_s)
        except TidemarkError as err:
            self._listener.store_not_limited(address, err)
        else:
            self._told[address] = revision
