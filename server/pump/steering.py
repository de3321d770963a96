"""A pump's way off the cluster: paused, to come back, or closed, once every reader has everything.

    online -> pausing -> paused          online -> closing -> offline

While it is closing, prewrites are refused; commits and rollbacks come in until all prewrites are
matched, then a last heartbeat is stored, and the readers are waited for. If they do not get there
in time the pump ends as paused: it can be started and closed again, and nothing was lost. Source:
tidb-binlog pump/server.go.
"""

import asyncio
import os
import signal

import structlog

from server.pump.registry import (
    CLOSING,
    OFFLINE,
    ONLINE,
    PAUSED,
    PAUSING,
    Node,
    Registry,
    drainers_behind,
)
from server.rpc.pd import PdClient
from storage.meta.meta import Meta
from storage.model.errors import ConflictError, InvalidError, NotFoundError, TidemarkError
from storage.pump.binlog import fake, parse
from storage.pump.storage import PumpStorage

_POLL_SECONDS = 0.5
_STATES = {"pause": PAUSING, "close": CLOSING}

_log = structlog.get_logger(__name__)


class NodeUnknownError(NotFoundError):
    """Another pump is meant."""

    code = "ErrPumpUnknown"


class ActionUnknownError(InvalidError):
    """There is no such action."""

    code = "ErrPumpAction"


class StateConflictError(ConflictError):
    """The pump is leaving already."""

    code = "ErrPumpState"


class Steering:
    """Takes `pause` and `close`, and ends the daemon."""

    def __init__(
        self,
        node: Node,
        registry: Registry,
        storage: PumpStorage,
        pd: PdClient,
        meta: Meta,
        close_seconds: float,
    ) -> None:
        self._node = node
        self._registry = registry
        self._storage = storage
        self._pd = pd
        self._meta = meta
        self._close_seconds = close_seconds
        self._leaving = asyncio.Event()

    async def apply(self, node_id: str, action: str) -> str:
        """Begin to leave; returns the state of now.

        Raises:
            NodeUnknownError, ActionUnknownError, StateConflictError: not this node, not an action,
                not online.
            TidemarkError: the registry does not take the new state.
        """
        if node_id != self._node.node_id:
            raise NodeUnknownError(f"nodeID {node_id} not exists; this is {self._node.node_id}")
        if action not in _STATES:
            raise ActionUnknownError(f"invalid action {action}; there are {', '.join(_STATES)}")
        if self._node.state != ONLINE:
            raise StateConflictError(
                f"this pump's state is {self._node.state}, apply {action} failed!"
            )
        try:
            # In the registry before anything is done: TiDB must stop writing prewrites here first.
            await self._registry.announce(_STATES[action])
        except TidemarkError:
            self._node.state = ONLINE
            raise
        self._leaving.set()
        return self._node.state

    async def run(self) -> None:
        """Leave when asked to; then the daemon is told to end."""
        await self._leaving.wait()
        _log.info("pump is leaving", state=self._node.state)
        self._node.leaves_as = (
            OFFLINE if self._node.state == CLOSING and await self._is_drained() else PAUSED
        )
        # The same way out as an operator's: drain, leave the registry, exit 0.
        os.kill(os.getpid(), signal.SIGTERM)

    async def _is_drained(self) -> bool:
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._drain()
        except TimeoutError:
            _log.error(
                "readers have not had everything: the pump is paused, not offline; start it and "
                "close it again",
                seconds=self._close_seconds,
                waiting_prewrites=self._storage.statistics().waiting_prewrites,
            )
            return False
        return True

    async def _drain(self) -> None:
        last_ts = 0
        while not (last_ts and await self._have_all(last_ts)):
            # Only when every prewrite has its outcome: a heartbeat above an open one would let
            # readers pass its commit.
            if not last_ts and self._storage.all_matched:
                last_ts = await self._last_heartbeat()
            await asyncio.sleep(_POLL_SECONDS)
        # Heartbeats may follow; Drainer compares its position with this number, and would wait for
        # ever for a moving one.
        self._node.drained_ts = last_ts

    async def _last_heartbeat(self) -> int:
        try:
            ts = await self._pd.tso()
            await self._storage.write([parse(fake(ts))])
        except TidemarkError as err:
            _log.warning("last heartbeat not written", error=str(err))
            return 0
        return ts

    async def _have_all(self, ts: int) -> bool:
        if self._storage.max_commit_ts < ts or self._storage.readers.behind(ts):
            return False
        try:
            behind = await drainers_behind(self._meta, ts)
        except TidemarkError as err:
            _log.warning("drainers not known", error=str(err))
            return False
        if behind:
            _log.info("waiting for drainers", drainers=behind[:8], ts=ts)
        return not behind
