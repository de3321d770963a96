"""A term whose state somebody else changes in the metadata ends: its memory is no longer what the metadata says.

With embedded metadata nobody else can: etcd's API on the coordinator's port refuses it
(`server.coordinator.etcd.own_keys`). A real etcd has ports of its own. Safepoints and keyspaces are not guarded here:
an operator and PD may change them, and `gcsafepoint.state.stored` follows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from server.coordinator.errors import NotLeaderError
from server.coordinator.keys import ClusterKeys
from server.coordinator.leadership.durable_limit import COPIES
from server.coordinator.leadership.ledger import Ledger
from storage.meta.errors import CompactedError, MetaUnavailableError

_PUT_BACK_S = 1.0

_log = structlog.get_logger(__name__)


class StateGuard:
    """Watches a term's own keys from `start_revision` on, the first that the term has not read."""

    def __init__(self, ledger: Ledger, keys: ClusterKeys, start_revision: int) -> None:
        self._ledger = ledger
        self._start_revision = start_revision
        limits = [keys.path("timestamp"), keys.path("alloc_id")]
        state = [keys.path(tail) for tail in ("raft", "region_label/", "rule_group/", "rules/")]
        self._prefixes = [*limits, *(COPIES + key for key in limits), *state]

    async def run(self, put_back: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """End the leadership at the first foreign write, after `put_back` has restored what must not be lost."""
        if not self._ledger.leadership.fence:
            return
        async with asyncio.TaskGroup() as tasks:
            for prefix in self._prefixes:
                tasks.create_task(self._watch(prefix, put_back), name=f"state-{prefix.decode()}")

    async def _watch(self, prefix: bytes, put_back: Sequence[Callable[[], Awaitable[None]]]) -> None:
        try:
            event = await self._ledger.foreign_write(prefix, self._start_revision)
        except CompactedError:
            reason = f"changes under {prefix.decode()} were compacted before they were seen"
        else:
            change = "deleted" if event.deleted else "written"
            key = event.pair.key.decode(errors="backslashreplace")
            reason = f"{key} was {change} by somebody else at revision {event.pair.mod_revision}"
        leadership = self._ledger.leadership
        if leadership.ended.is_set():
            return
        _log.error(
            "the coordinator's own state was changed: this term ends, the next one reads it afresh", reason=reason
        )
        for restore in put_back:
            with suppress(NotLeaderError, MetaUnavailableError, TimeoutError):
                async with asyncio.timeout(_PUT_BACK_S):
                    await restore()
        leadership.end(reason)
