"""What was read from files that never change: the values that were used last stay in memory, so
that a cut after a cut need not read them again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """Values with a size (`nbytes`: Arrow tables, NumPy arrays) in bounded memory; any number of
    threads may ask.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, name: Hashable, read: Callable[[], Any]) -> Any:
        """The value of that name: as it was kept, or as `read` gives it."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name]
        value = read()
        self.put(name, value)
        return value

    def put(self, name: Hashable, value: Any) -> None:
        """Keep a value, as of a file that was just written."""
        if value.nbytes > self._most_bytes:
            return
        with self._lock:
            if name not in self._values:
                self._values[name] = value
                self._bytes += value.nbytes
            while self._bytes > self._most_bytes:
                _, oldest = self._values.popitem(last=False)
                self._bytes -= oldest.nbytes
