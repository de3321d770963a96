import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.pump.http_api import HttpApi
from server.pump.registry import (
    DRAINERS,
    ONLINE,
    PAUSED,
    PAUSING,
    PUMPS,
    Node,
    PumpLifecycle,
    Registry,
    drainers_behind,
    node_id,
    slowest_drainer,
)
from storage.meta.meta import KeyValue
from storage.model.errors import UnavailableError


def test_the_registry_entry_is_the_one_of_the_original() -> None:
    node = Node("vm:21050", "127.0.0.1:21050", "online")
    assert node.record(max_commit_ts=12, update_ts=34) == (
        b'{"nodeId":"vm:21050","host":"127.0.0.1:21050","state":"online","isAlive":false,"score":0,"label":null,'
        b'"maxCommitTS":12,"updateTS":34}'
    )


def test_a_node_keeps_its_name_unless_given_another(tmp_path: Path) -> None:
    first = node_id(tmp_path, "", "127.0.0.1:8250")
    assert first.endswith(":8250")
    assert node_id(tmp_path, "", "127.0.0.1:9999") == first
    assert node_id(tmp_path, "pump-1", "127.0.0.1:9999") == "pump-1"
    assert node_id(tmp_path, "", "127.0.0.1:1") == "pump-1"


def test_a_name_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    node_id(tmp_path, "pump-1", "127.0.0.1:8250")
    monkeypatch.setattr(os, "fsync", full)
    assert node_id(tmp_path, "pump-1", "127.0.0.1:8250") == "pump-1"
    with pytest.raises(OSError, match="No space"):
        node_id(tmp_path, "pump-2", "127.0.0.1:8250")
    assert node_id(tmp_path, "", "127.0.0.1:8250") == "pump-1"


class Registered:
    """The registry, as others have written to it."""

    def __init__(self, entries: dict[bytes, bytes]) -> None:
        self.pairs = [KeyValue(key, value, 1, 1, 1) for key, value in entries.items()]

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        return [pair for pair in self.pairs if pair.key.startswith(prefix)]


BAD = [b"", b"\xff", b"[]", b"null", b"{", b"[" * 99_999]


async def test_an_entry_that_cannot_be_read_spoils_no_status_of_the_others() -> None:
    entries = {PUMPS + b"b%d" % number: value for number, value in enumerate(BAD)}
    entries |= {PUMPS + b"good": b'{"state":"online"}', PUMPS + b"\xff": b""}
    storage: Any = SimpleNamespace(max_commit_ts=7)
    others: Any = None
    meta: Any = Registered(entries)
    answer = json.loads((await HttpApi(storage, meta, others, others)._status()).body)
    assert answer["StatusMap"] == {"good": {"state": "online"}}
    assert answer["ErrMsg"] == "unreadable entries: b0, b1, b2, b3, b4, b5, \ufffd"


async def test_a_drainer_whose_entry_cannot_be_read_is_believed_to_have_nothing() -> None:
    bad = [*BAD, b'{"maxCommitTS":Infinity}', b'{"maxCommitTS":null}', b"{}"]
    for value in bad:
        meta: Any = Registered({DRAINERS + b"d": value, DRAINERS + b"e": b'{"maxCommitTS":9}'})
        assert await slowest_drainer(meta) == (0, "d")
        assert await drainers_behind(meta, 5) == ["d"]


class SlowCoordinator:
    """Gives no timestamp and takes no entry before it is told to."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.was_called = asyncio.Event()
        self.states: list[str] = []
        self.refusal: UnavailableError | None = None

    async def tso(self) -> int:
        self.was_called.set()
        await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        return 7

    async def put(self, _: bytes, value: bytes) -> None:
        self.states.append(json.loads(value)["state"])


@pytest.mark.parametrize("action", ["pause", "close"])
async def test_a_pump_whose_pause_was_given_up_by_its_client_stays_online(action: str) -> None:
    coordinator: Any = SlowCoordinator()
    storage: Any = SimpleNamespace(max_commit_ts=7)
    node = Node("pump-1", "127.0.0.1:8250", ONLINE)
    registry = Registry(node, coordinator, coordinator, storage, 3600)
    lifecycle = PumpLifecycle(node, registry, storage, coordinator, coordinator, 3600)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(lifecycle.apply("pump-1", action))
        await coordinator.was_called.wait()
        call.cancel()
    assert node.state == ONLINE
    coordinator.answers.set()
    assert await lifecycle.apply("pump-1", "pause") == PAUSING
    assert coordinator.states == [PAUSING]


async def test_a_pump_that_has_ended_is_not_put_online_by_a_pause_that_fails_then() -> None:
    coordinator: Any = SlowCoordinator()
    coordinator.refusal = UnavailableError("no leader")
    storage: Any = SimpleNamespace(max_commit_ts=7)
    node = Node("pump-1", "127.0.0.1:8250", ONLINE)
    registry = Registry(node, coordinator, coordinator, storage, 3600)
    lifecycle = PumpLifecycle(node, registry, storage, coordinator, coordinator, 3600)

    async def refuse() -> None:
        coordinator.answers.set()

    calls = lifecycle.apply("pump-1", "pause"), registry.leave(), refuse()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes == [coordinator.refusal, None, None]
    assert node.state == PAUSED
