"""Settings changed online: sizes as tikv-ctl writes them, kept, and refused with a reason."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.store.admin_service import SETTINGS_KEY, BadSizeError, OnlineConfig, parse_size
from storage.mvcc.engine import Engine
from storage.mvcc.group_commit import GroupCommit
from tests.memory_kv import StallingKV


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("10MB", 10 << 20),
        ("10MiB", 10 << 20),
        ("512 KB", 512 << 10),
        ("1.5G", 3 << 29),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_tikv_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "10XB", "ten", "1e9"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadSizeError, match="such as 10MB"):
        parse_size(text)


async def test_a_setting_whose_caller_gave_up_is_in_force_when_it_is_kept() -> None:
    followed: dict[str, int] = {}
    kv = StallingKV(SETTINGS_KEY)
    names = ("gc.rate", "scan.rate")
    with ThreadPoolExecutor(1) as writer:
        group = GroupCommit(Engine(kv), writer, lambda _: None)
        config = OnlineConfig(
            kv,
            group,
            {name: lambda value, name=name: followed.update({name: value}) for name in names},
        )
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(group.run())
            setting = tasks.create_task(config.set("gc.rate", "1KB"))
            await kv.stalled.wait()
            setting.cancel()
            await asyncio.wait([setting])
            kv.go_on()
            await config.set("scan.rate", "2KB")
            running.cancel()
    assert followed == {"gc.rate": 1024, "scan.rate": 2048}
    kept: dict[str, int] = {}
    OnlineConfig(
        kv, group, {name: lambda value, name=name: kept.update({name: value}) for name in names}
    )
    assert kept == followed
