"""What daemons keep their metadata in."""

import asyncio

import pytest

from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from tests.memory_kv import MemoryKV


@pytest.fixture
async def meta():
    server = EmbeddedEtcd(MemoryKV())
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(server.run()), tasks.create_task(server.run_expiry())]
        yield EtcdMeta(server)
        for task in running:
            task.cancel()
        server.close()
