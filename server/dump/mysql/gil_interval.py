"""How long a thread that reads chunks may keep the log's waiting:
shorter while there are rounds, as before otherwise.

Python has one interval for the whole process, and 5 ms by default: that would be the log's lag for
each batch. Between rounds, and without dumps, the other threads of the process get theirs back.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SHORT_S: Final = 0.0005


class GilInterval:
    """The process's interval; used on the event loop's thread only."""

    def __init__(self) -> None:
        self._users = 0
        self._before_s = 0.0

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Let threads take turns often for the block, and for others that overlap it."""
        if not self._users:
            self._before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._before_s, SHORT_S))
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before_s)


GIL_INTERVAL: Final = GilInterval()
