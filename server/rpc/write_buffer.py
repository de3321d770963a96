"""A transaction's uncommitted writes; its own reads see them before the store's values. Pure."""

from collections.abc import Collection, Iterable, Mapping

from kvproto import kvrpcpb_pb2 as kvrpcpb


class WriteBuffer:
    """The last mutation of each key."""

    def __init__(self) -> None:
        self._mutations: dict[bytes, kvrpcpb.Mutation] = {}

    def __bool__(self) -> bool:
        return bool(self._mutations)

    def __contains__(self, key: bytes) -> bool:
        return key in self._mutations

    @property
    def mutations(self) -> Collection[kvrpcpb.Mutation]:
        """The last mutation of each key."""
        return self._mutations.values()

    @property
    def keys(self) -> set[bytes]:
        """The keys that were written or locked."""
        return set(self._mutations)

    def add(self, mutation: kvrpcpb.Mutation) -> None:
        """Record a mutation, in place of an earlier one of its key."""
        self._mutations[mutation.key] = mutation

    def lock(self, keys: Iterable[bytes]) -> None:
        """Mutations that change nothing, for those of `keys` that have none."""
        for key in keys:
            self._mutations.setdefault(key, kvrpcpb.Mutation(op=kvrpcpb.Lock, key=key))

    def value(self, key: bytes) -> bytes | None:
        """The value that a read gives of a key in the buffer; None if it was deleted."""
        mutation = self._mutations[key]
        return mutation.value if mutation.op in (kvrpcpb.Put, kvrpcpb.Insert) else None

    def between(self, start_key: bytes, end_key: bytes) -> set[bytes]:
        """Its keys in `[start_key, end_key)`; an empty end is no end."""
        return {
            key for key in self._mutations if start_key <= key and (not end_key or key < end_key)
        }

    def over(self, stored: Mapping[bytes, bytes], keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The store's pairs as the transaction sees them, which wrote `keys`."""
        seen = {**stored, **{key: self.value(key) for key in keys}}
        return {key: value for key, value in seen.items() if value is not None}
