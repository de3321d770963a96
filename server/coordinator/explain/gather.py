"""The situation of a moment, gathered: safe points from memory, records from the metadata, the rest from captures.

A part that cannot be had leaves its problem in its place; only the safe points are indispensable.
"""

import asyncio
from collections.abc import Sequence

from gcsafepoint.explain.situation import Feed, Situation, Worker
from gcsafepoint.state.states import GcView
from gcsafepoint.worker.records import LAST_RUN_TIME, LEADER_DESC, read_config
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo, checkpoint_of
from server.coordinator.explain.captures import Told, ask_captures
from server.gc_worker.cluster import MetaRecords
from server.rpc.credentials import SecurityConfig
from storage.meta.meta import KeyValue, Meta
from storage.model.errors import TidemarkError


async def gather(view: GcView, meta: Meta, security: SecurityConfig) -> Situation:
    """Everything around `view`.

    Raises:
        MetaUnavailableError: the metadata cannot be read.
    """
    told = await ask_captures(meta, security)
    infos, statuses = await meta.get_prefix(keys.INFOS), await meta.get_prefix(keys.STATUSES)
    feeds = await asyncio.to_thread(_feeds, infos, statuses, told)  # records hold the schemas of all tables
    problems = [f"capture {capture.id}: {capture.problem}" for capture in told.captures if capture.problem]
    problems += [f"changefeed {feed.id}: {feed.error}" for feed in feeds.values() if feed.state == "unreadable"]
    return Situation(view, feeds, tuple(told.captures), await _worker(meta), tuple(problems))


def _feeds(infos: Sequence[KeyValue], statuses: Sequence[KeyValue], told: Told) -> dict[str, Feed]:
    checkpoints = {pair.key.removeprefix(keys.STATUSES): pair.value for pair in statuses}
    feeds = [_feed(pair, checkpoints.get(pair.key.removeprefix(keys.INFOS)), told) for pair in infos]
    return {feed.id: feed for feed in feeds}


def _feed(info_pair: KeyValue, status: bytes | None, told: Told) -> Feed:
    name = info_pair.key.removeprefix(keys.INFOS).decode(errors="backslashreplace")
    try:
        info = ChangefeedInfo.from_json(info_pair.value)
        checkpoint_ts = checkpoint_of(status) if status is not None else info.start_ts
    except TidemarkError as err:
        return Feed(name, "unreadable", 0, err.code, err.message)
    capture, tables = told.running.get(name, ("", ()))
    code, message = (info.error.code, info.error.message) if info.error else ("", "")
    return Feed(name, info.state.value, checkpoint_ts, code, message, capture, tables)


async def _worker(meta: Meta) -> Worker:
    records = MetaRecords(meta)
    try:
        config = await read_config(records)
        held = await records.read(LEADER_DESC) | await records.read(LAST_RUN_TIME)
    except (TidemarkError, ValueError) as err:
        return Worker(problem=f"its records cannot be read: {err}")
    leader, last_run = (held[key].value if key in held else "" for key in (LEADER_DESC, LAST_RUN_TIME))
    return Worker(leader, config.enable, config.life_time_ms, config.run_interval_ms, last_run)
