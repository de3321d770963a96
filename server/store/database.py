"""The store's LevelDB: counts every version it writes, in the same batch (see `storage.mvcc.version_counts`)."""

from collections.abc import Callable, Mapping
from pathlib import Path

from storage.kv import WriteBatch
from storage.leveldb import LevelDB


class Database(LevelDB):
    """`count` is set once the regions are known; before that nothing but identity is written."""

    def __init__(self, directory: Path, write_buffer_bytes: int) -> None:
        super().__init__(directory, write_buffer_bytes=write_buffer_bytes)
        self.count: Callable[[Mapping[bytes, bytes | None]], Mapping[bytes, bytes]] = lambda _: {}

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`; adds the new counts of the regions it writes to."""
        batch.ops.update(self.count(batch.ops))
        super().write(batch, sync=sync)
