"""The shared blocks that were read last: neighbours in a block are often fetched one after another."""

import threading
from collections import OrderedDict
from typing import Final

from sorter.segment import Pointer
from sorter.shared_block import SharedBlock

_MOST: Final = 8


class RecentBlocks:
    """A few blocks that were read and checked; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Pointer, SharedBlock] = OrderedDict()

    def get(self, pointer: Pointer) -> SharedBlock | None:
        """The block, if it is here."""
        if not self._blocks:
            return None
        with self._lock:
            found = self._blocks.get(pointer)
            if found is not None:
                self._blocks.move_to_end(pointer)
            return found

    def put(self, pointer: Pointer, read: SharedBlock) -> None:
        """Keep a block, instead of the one that nobody has wanted for longest."""
        with self._lock:
            self._blocks[pointer] = read
            while len(self._blocks) > _MOST:
                self._blocks.popitem(last=False)
