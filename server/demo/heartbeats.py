"""The heartbeats of transactions: one task keeps the locks of all that want it alive."""

import asyncio
from typing import Final, Protocol

EVERY_S: Final = 10.0


class Beating(Protocol):
    """What holds locks."""

    async def heartbeat(self) -> None:
        """Keep them alive; a failure is logged."""


class Heartbeats:
    """Those of one client."""

    def __init__(self) -> None:
        self._kept: set[Beating] = set()

    def keep(self, transaction: Beating) -> None:
        """Do not let the transaction's locks expire."""
        self._kept.add(transaction)

    def forget(self, transaction: Beating) -> None:
        """Let the transaction's locks expire from now on."""
        self._kept.discard(transaction)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            for transaction in list(self._kept):
                if transaction in self._kept:  # it may have ended while another one's was under way
                    await transaction.heartbeat()
