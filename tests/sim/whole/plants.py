"""Bugs in the product that the simulation of a whole cluster must find."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import gcsafepoint.worker.election
import server.capture.worker.splitting
import server.store.identity
from gcsafepoint.state.rules import GcState
from gcsafepoint.worker.election import Move
from server.capture.processor import ProcessorPosition
from server.capture.safepoint import ChangefeedSafePoints
from server.capture.worker.remote import RemoteShare
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.tso import Oracle
from server.puller.tikv.frontier import Frontier
from sink.manager import SinkManager
from storage.kv import WriteBatch
from storage.meta.client import EtcdMeta
from storage.meta.meta import Delete, Put
from storage.model.ts import compose
from storage.mvcc.change_feed import OpenLocks
from storage.mvcc.engine import Engine
from storage.mvcc.gc import RangeGC

_AHEAD = compose(10_000)
_apply, _hold = Engine.apply, ChangefeedSafePoints.hold
_read = SinkManager.read
_divided, _add = server.capture.worker.splitting.divided, RemoteShare.add
_take, _drop_expired, _init_range = Oracle.take, GcState.drop_expired, RangeGC.__init__
_DAYS_S = 3 * 86400.0


@dataclass
class _Unsynced:
    kv: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kv, name)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        del sync
        self.kv.write(batch, sync=False)


def _apply_unsynced(self: Engine, commands: Any) -> Any:
    kv, self.kv = self.kv, _Unsynced(self.kv)
    try:
        return _apply(self, commands)
    finally:
        self.kv = kv


async def _never_lost(_pd: Any, _store_id: int) -> bool:
    return False


async def _hold_too_little(
    self: Any, source: Any, changefeed: str, checkpoint_ts: int, *, failed_s: float = 0.0
) -> None:
    await _hold(self, source, changefeed, checkpoint_ts + _AHEAD, failed_s=failed_s)


async def _campaign_anyway(self: EtcdMeta, key: bytes, value: bytes, lease: int) -> int:
    await self.txn((), [Delete(key)])
    return (await self.txn((), [Put(key, value, lease)])).revision


def _read_too_far(self: Any, span: Any, start_ts: int, end_ts: int, **named: Any) -> Any:
    return _read(self, span, start_ts, max(end_ts, self.resolved_ts(span)), **named)


def _take_the_clock(self: Oracle, count: int, now_ms: int) -> Any:
    self._physical_ms = min(self._physical_ms, now_ms)
    return _take(self, count, now_ms)


def _expired_too_early(self: GcState, now_s: float) -> Any:
    return _drop_expired(self, now_s + _DAYS_S)


def _collecting_too_much(
    self: RangeGC, reader: Any, lower: bytes, upper: bytes, safe_point: int
) -> None:
    _init_range(self, reader, lower, upper, safe_point + _AHEAD)


def _last_part_forgotten(span: Any, inside: Any, parts: int) -> Any:
    return _divided(span, inside, parts)[: max(parts - 1, 1)]


def _begun_too_late(self: RemoteShare, tables: Any, _start_ts: int) -> None:
    _add(self, tables, self.resolved_ts())


PLANTS: dict[str, tuple[Any, str, Any]] = {
    "founders": (server.store.identity, "_has_lost", _never_lost),
    "locks-ignored": (OpenLocks, "min_start_ts", lambda _self, _key: None),
    "unsynced": (Engine, "apply", _apply_unsynced),
    "expired-too-early": (GcState, "drop_expired", _expired_too_early),
    "hold-too-little": (ChangefeedSafePoints, "hold", _hold_too_little),
    "collect-too-much": (RangeGC, "__init__", _collecting_too_much),
    "checkpoint-too-early": (
        ProcessorPosition,
        "checkpoint_ts",
        property(lambda self: self.resolved_ts),
    ),
    "timestamps-go-back": (Oracle, "take", _take_the_clock),
    "two-coordinators": (
        Leadership,
        "held",
        property(lambda self: not self.ended.is_set()),
    ),
    "two-owners": (EtcdMeta, "campaign", _campaign_anyway),
    "two-collectors": (gcsafepoint.worker.election, "next_move", lambda *_: Move.CLAIM),
    "read-too-far": (SinkManager, "read", _read_too_far),
    "target-passed": (SinkManager, "limit_ts", lambda _self, _ts: None),
    "part-forgotten": (server.capture.worker.splitting, "divided", _last_part_forgotten),
    "moved-too-late": (RemoteShare, "add", _begun_too_late),
    "fastest-region": (
        Frontier,
        "resolved_ts",
        property(lambda self: max(piece.ts for piece in self._pieces)),
    ),
}
"""Two stores take themselves for the first; resolved timestamps pass locks; what is answered is not
durable; a safepoint of a day expires at once, a changefeed protects less than it needs, a store
collects more than it may; a checkpoint is where rows can be read; timestamps follow a clock that
jumps; leases are not looked at, or not respected; a range gives what came later, too; readers pass
the target_ts; of a table that is divided a part is missing; a capture that gets a table begins
above the checkpoint; a table is complete when one of its regions is.
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
