"""The pump's entry in the registry where TiDB and Drainer look for pumps.

`/tidb-binlog/v1/pumps/<nodeId>` holds JSON as the original Pump writes it, without a lease, renewed
every few seconds; TiDB writes to the pumps whose state is `online`. Source: tidb-binlog pkg/node.
"""

import asyncio

import structlog

from server.pump.node import Node
from server.rpc.pd import PdClient
from storage.meta.meta import Meta
from storage.model.errors import TidemarkError, UnavailableError
from storage.pump.storage import PumpStorage

PREFIX = b"/tidb-binlog/v1/pumps/"
_WRITE_SECONDS = 3.0

_log = structlog.get_logger(__name__)


class RegistryUnavailableError(UnavailableError):
    """The registry entry cannot be written now."""

    code = "ErrPumpRegistry"


class Registry:
    """Writes the entry of one node."""

    def __init__(
        self, node: Node, meta: Meta, pd: PdClient, storage: PumpStorage, interval_seconds: float
    ) -> None:
        self.node = node
        self._meta = meta
        self._pd = pd
        self._storage = storage
        self._interval_seconds = interval_seconds

    async def announce(self, state: str) -> None:
        """Change the state and write it.

        Raises:
            RegistryUnavailableError: the coordinator does not answer in time.
            TidemarkError: it refuses.
        """
        self.node.state = state
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                record = self.node.record(self._storage.max_commit_ts, await self._pd.tso())
                await self._meta.put(PREFIX + self.node.node_id.encode(), record)
        except TimeoutError as err:
            raise RegistryUnavailableError(
                f"the coordinator did not take the registry entry of {self.node.node_id} in "
                f"{_WRITE_SECONDS} s"
            ) from err

    async def leave(self) -> None:
        """Say that this pump has ended, if anybody can still be told."""
        try:
            await self.announce(self.node.leaves_as)
        except TidemarkError as err:
            _log.warning("registry entry not renewed", error=str(err))

    async def run(self) -> None:
        """Renew the entry until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.announce(self.node.state)
            except TidemarkError as err:
                _log.warning("registry entry not renewed", error=str(err))
