"""Bugs in the product that the simulation must find."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from server.capture.fence import Fence, FencedMeta
from server.capture.maintainers import Maintainers
from server.changefeed import keys


async def _unfenced(self: Any, compares: Any, success: Any, failure: Any = ()) -> Any:
    return await self._meta.txn(compares, success, failure)


async def _stolen(self: Any, changefeed: str, lease: Any) -> Fence:
    key = keys.maintainer(changefeed)
    await self._meta.delete(key)
    return Fence(key, await self._meta.put(key, self.id.encode(), lease.id))


PLANTS = {
    "unfenced": (FencedMeta, "txn", _unfenced),
    "unheld": (Maintainers, "check_held", lambda _: None),
    "stolen": (Maintainers, "_claimed", _stolen),
    "undoubted": (Fence, "note_unknown_outcome", lambda _: None),
}
"""Captures that have lost a key write, or serve; a key is taken from whoever has it; a write that
got no answer arrives behind later ones.
"""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Have a bug for the block; empty: none."""
    if not name:
        yield
        return
    owner, attribute, wrong = PLANTS[name]
    with patch.object(owner, attribute, wrong):
        yield
