"""Who wants to hear of which keys (pure): a change wakes only those whose watches it is for.

Invariant: a listener that heard nothing since it last asked has missed nothing, so its watches may skip what lies
between.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from etcdpb import kv_pb2

from storage.meta.store.ranges import in_range

K = TypeVar("K")


class Listener:
    """One stream's ear; `wake` is called when there is something new for it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._first = 0

    def hear(self, revision: int) -> None:
        """There is a change for it in `revision`."""
        self._first = self._first or revision
        self._wake()

    def heard(self) -> int:
        """The first revision with a change for it since this was last asked; 0: none."""
        first, self._first = self._first, 0
        return first


class Interest:
    """Key ranges and who listens to them, each as often as it was added."""

    def __init__(self) -> None:
        self._keys: dict[bytes, Counter[Listener]] = {}
        self._ranges: dict[tuple[bytes, bytes], Counter[Listener]] = {}

    def add(self, key: bytes, range_end: bytes, listener: Listener) -> None:
        """Listen to a key or range."""
        if range_end:
            self._ranges.setdefault((key, range_end), Counter())[listener] += 1
        else:
            self._keys.setdefault(key, Counter())[listener] += 1

    def remove(self, key: bytes, range_end: bytes, listener: Listener) -> None:
        """Take back one `add`."""
        if range_end:
            _remove(self._ranges, (key, range_end), listener)
        else:
            _remove(self._keys, key, listener)

    def tell(self, revision: int, events: Iterable[kv_pb2.Event]) -> None:
        """Let those hear of `revision` who listen to a key it changed."""
        for event in events:
            key = event.kv.key
            for listener in self._keys.get(key, ()):
                listener.hear(revision)
            for (start, end), listeners in self._ranges.items():
                if in_range(key, start, end):
                    for listener in listeners:
                        listener.hear(revision)


def _remove(index: dict[K, Counter[Listener]], place: K, listener: Listener) -> None:
    listeners = index[place]
    listeners[listener] -= 1
    if not listeners[listener]:
        del listeners[listener]
    if not listeners:
        del index[place]
