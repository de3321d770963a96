"""The store's LevelDB: counts every version it writes, in the same batch (see `storage.mvcc.version_counts`)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from storage.kv import WriteBatch
from storage.leveldb import LevelDB

_REMEDY: Final = "Restore the store's data directory from a backup; keys outside of the damage can be read until then"


class Database(LevelDB):
    """`count` is set once the regions are known; before that nothing but identity is written."""

    def __init__(self, directory: Path, write_buffer_bytes: int) -> None:
        super().__init__(directory, write_buffer_bytes=write_buffer_bytes, remedy=_REMEDY)
        self.count: Callable[[Mapping[bytes, bytes | None]], Mapping[bytes, bytes]] = lambda _: {}

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`; adds the new counts of the regions it writes to."""
        batch.ops.update(self.count(batch.ops))
        super().write(batch, sync=sync)
