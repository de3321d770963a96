"""How far a puller is behind is shown as long as it runs, and per changefeed."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from server.changefeed.source import Address
from server.puller.mysql.puller import LogPuller, Upstream
from server.puller.mysql.session.options import MySqlOptions
from server.puller.pump import puller as pump
from storage.model.ts import compose

NOTHING: Any = None


def shown(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"tidemark_puller_{name}", {"changefeed": "lagging"})


class Registry:
    """A registry without pumps."""

    async def get_prefix(self, prefix: bytes) -> list[Any]:
        del prefix
        return []


class Clock:
    async def tso(self) -> int:
        return compose(20_000)


async def nothing(*_: object) -> None: ...


async def forever(*_: object) -> None:
    await asyncio.Event().wait()


async def test_pumps_that_are_not_read_any_more_are_not_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context: Any = SimpleNamespace(pd=Clock(), kv=None)
    registry: Any = Registry()
    feed = pump.Feed("lagging", (), 0, NOTHING, NOTHING)
    monkeypatch.setattr(pump.Schemas, "at", nothing)
    monkeypatch.setattr(pump, "Tables", lambda *_: None)
    monkeypatch.setattr(pump.PumpPuller, "_deliver", forever)
    puller = pump.PumpPuller(context, registry, feed, nothing)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(puller.run())
        while shown("slowest_pump_behind_seconds") is None:  # noqa: ASYNC110 - a gauge has no event
            await asyncio.sleep(0.01)
        running.cancel()
    assert shown("slowest_pump_behind_seconds") is None


def test_a_log_that_stands_still_gets_older_and_one_that_is_not_read_is_not_shown() -> None:
    options = MySqlOptions(addresses=(Address("db", 3306),), user="u")
    start_ts = compose(int((time.time() - 3600) * 1000))
    rows: Any = SimpleNamespace(open_transactions=SimpleNamespace(memory_bytes=1))
    puller = LogPuller((), start_ts, Upstream("lagging", options, NOTHING), rows, NOTHING)
    with puller._showing_lag():
        before = shown("mysql_resolved_lag_seconds") or 0.0
        assert 3600 <= before < 3700
        assert (shown("mysql_resolved_lag_seconds") or 0.0) > before
        puller.resolved_ts = compose(int(time.time() * 1000))
        assert (shown("mysql_resolved_lag_seconds") or 0.0) < 60
    assert shown("mysql_resolved_lag_seconds") is None
