"""Random committed histories, and what they must read as."""

from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st

from storage.mvcc import percolator
from storage.mvcc.engine import Engine
from storage.mvcc.prewrite import Mutation, Op, Prewrite, Prewritten, prewrite
from tests.memory_kv import MemoryKV

KEYS = st.sampled_from([b"", b"a", b"ab", b"abcdefgh", b"abcdefghi", b"b"])
VALUES = st.sampled_from([None, b"", b"x", b"y" * 300])
"""None deletes."""

TXNS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "rollback", "open", "lock"]),
        st.dictionaries(KEYS, VALUES, min_size=1),
    ),
    max_size=14,
)


@dataclass
class History:
    """A store after some transactions: number n starts at 10 n and commits at 10 n + 5."""

    engine: Engine
    versions: dict[bytes, list[tuple[int, int, bytes | None]]] = field(default_factory=dict)
    open: dict[bytes, tuple[int, bytes | None]] = field(default_factory=dict)
    end_ts: int = 0

    def value(self, key: bytes, ts: int) -> bytes | None:
        """What a key is at ts, locks aside."""
        seen = [version for version in self.versions.get(key, []) if version[1] <= ts]
        return seen[-1][2] if seen else None


def played(txns: list[tuple[str, dict[bytes, bytes | None]]]) -> History:
    """Run the transactions one after the other; those that meet a lock do nothing."""
    history = History(Engine(MemoryKV()))
    for number, (end, changes) in enumerate(txns, 1):
        start_ts, commit_ts = number * 10, number * 10 + 5
        history.end_ts = commit_ts
        keys = sorted(changes)
        if any(key in history.open for key in keys):
            continue
        ops = [
            Op.LOCK if end == "lock" else Op.DELETE if changes[key] is None else Op.PUT
            for key in keys
        ]
        mutations = [
            Mutation(op, key, changes[key] or b"") for op, key in zip(ops, keys, strict=True)
        ]
        txn = Prewrite(mutations=mutations, primary=keys[0], start_ts=start_ts, ttl_ms=1)
        assert history.engine.apply([partial(prewrite, txn=txn)]).results == [Prewritten()]
        if end == "open":
            history.open |= {key: (start_ts, changes[key]) for key in keys}
        elif end == "rollback":
            history.engine.apply([partial(percolator.rollback, keys=keys, start_ts=start_ts)])
        else:
            history.engine.apply(
                [partial(percolator.commit, keys=keys, start_ts=start_ts, commit_ts=commit_ts)]
            )
            for key in keys if end == "commit" else ():
                history.versions.setdefault(key, []).append((start_ts, commit_ts, changes[key]))
    return history
