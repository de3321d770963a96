"""Removes raw pairs whose TTL is over, in small groups between the clients' writes."""

import asyncio
from functools import partial

import structlog

from server.store.raw_calls import now_s
from server.store.runner import Runner
from storage.model.errors import CorruptError
from storage.mvcc import raw
from storage.mvcc.group_commit import StoreBusyError

_EVERY_S = 60.0
_KEYS = 1024
_log = structlog.get_logger(__name__)


async def expire(runner: Runner) -> None:
    """Look every minute until cancelled."""
    while True:
        try:
            while await _expire_some(runner) == _KEYS:
                """There may be more."""
        except StoreBusyError:
            _log.info("raw pairs are not expired now, the store is busy")
        except CorruptError as err:
            _log.error("raw pairs are not expired", error=err.message)
        await asyncio.sleep(_EVERY_S)


async def _expire_some(runner: Runner) -> int:
    keys = await runner.look(lambda reader: raw.expired(reader, now_s(), _KEYS))
    if keys:
        await runner.run(partial(raw.sweep, keys=keys, now_s=now_s()))
    return len(keys)
