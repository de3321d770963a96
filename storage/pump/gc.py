"""Deleting index keys up to gc_ts, batch by batch.

The loop of the original, `for iter.Next() && batches < 100`, steps onto one more key before it sees that the round is
full; kept for the next round, the iterator never comes back to it, and that key is leaked. Here a batch takes its
keys, and the next one begins just after the last key taken: no key lies between.
"""

from itertools import islice

from storage.kv import KV, WriteBatch
from storage.pump.index import COMMIT_PREFIX, commit_key, prewrite_of

BATCH_KEYS = 1024
BATCHES_PER_ROUND = 100


class Sweep:
    """One pass over the commits up to `gc_ts`; a prewrite goes together with its commit."""

    def __init__(self, kv: KV, gc_ts: int, *, batch_keys: int = BATCH_KEYS) -> None:
        assert batch_keys >= 2
        self._kv = kv
        self._next = COMMIT_PREFIX
        self._end = commit_key(gc_ts + 1, 0)
        self._commits = batch_keys // 2

    def delete_batch(self) -> int:
        """Delete the next keys, atomically; returns how many, 0 at the end of the pass."""
        batch = WriteBatch()
        for key, _ in islice(self._kv.scan(self._next, self._end), self._commits):
            batch.delete(key)
            batch.delete(prewrite_of(key))
            self._next = key + b"\0"
        if batch:
            self._kv.write(batch, sync=False)
        return len(batch)
