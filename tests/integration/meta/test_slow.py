"""A watcher that does not read costs a bounded amount of memory,
and is told from where it has to start anew.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc

from server.rpc.credentials import SecurityConfig
from storage.meta.client import open_meta
from storage.meta.errors import CompactedError

WRITES, FULL_AT, VALUE_BYTES = 160, 60, 512 << 10
GROWTH_BYTES = 32 << 20
"""Less than what is written after the buffers are full: 50 MiB,
and as much again for the pairs before.
"""


@pytest.fixture
def coordinator(tmp_path: Path, servers: Any) -> Iterator[Any]:
    with servers.coordinator(
        f"leveldb:{tmp_path / 'metadata'}", "--metadata-keep-revisions", "20"
    ) as process:
        yield process


def resident_bytes(process: Any) -> int:
    pages = Path(f"/proc/{process.running.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


async def test_a_watcher_that_does_not_read_is_cancelled_with_the_compacted_revision(
    coordinator: Any, servers: Any
) -> None:
    api = servers.Api([coordinator.address], SecurityConfig())
    async with api.channel(coordinator.address) as slow, open_meta(api.url, api.channel) as meta:
        call = rpc_pb2_grpc.WatchStub(slow).Watch()
        await call.write(
            rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"k", prev_kv=True))
        )
        assert (await call.read()).created
        full = 0
        for number in range(WRITES):
            await meta.put(b"k", b"%d" % number + bytes(VALUE_BYTES))
            full = resident_bytes(coordinator) if number == FULL_AT else full
        assert resident_bytes(coordinator) - full < GROWTH_BYTES
        revisions: list[int] = []
        while not (response := await call.read()).canceled:
            revisions += [event.kv.mod_revision for event in response.events]
        assert revisions == list(range(revisions[0], revisions[0] + len(revisions)))
        assert len(revisions) < WRITES
        assert response.compact_revision > revisions[-1]
        assert "compacted" in response.cancel_reason
        with pytest.raises(CompactedError, match="read the present state"):
            async for _ in meta.watch(b"k", revisions[0]):
                pass
        call.cancel()
