"""Shared settings under /global/config/, and PD's plain door to the metadata."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc
from kvproto import meta_storagepb_pb2, meta_storagepb_pb2_grpc, pdpb_pb2

from tests.integration.coordinator.in_process import Pd, coordinator

Item = pdpb_pb2.GlobalConfigItem


async def store(pd: Pd, *items: Item, path: str = "") -> None:
    await pd.stub.StoreGlobalConfig(
        pdpb_pb2.StoreGlobalConfigRequest(changes=items, config_path=path)
    )


async def load(pd: Pd, *names: str, path: str = "") -> Any:
    return await pd.stub.LoadGlobalConfig(
        pdpb_pb2.LoadGlobalConfigRequest(names=names, config_path=path)
    )


async def test_settings_are_kept_where_pd_keeps_them(tmp_path: Path) -> None:
    async with coordinator(tmp_path, bootstrapped=False) as pd:
        await store(pd, Item(name="a", value="1"), Item(name="b", payload=b"\xff"), Item(name="c"))
        await store(
            pd, Item(name="x", value="9"), Item(name="y", value="8"), path="/global/config/team"
        )
        await store(pd, Item(name="c", kind=pdpb_pb2.DELETE))
        stored = await rpc_pb2_grpc.KVStub(pd.channel).Range(
            rpc_pb2.RangeRequest(key=b"/global/config/team/x")
        )
        assert [pair.value for pair in stored.kvs] == [b"9"]
    async with coordinator(tmp_path) as pd:
        everything = await load(pd)
        assert {item.name: item.payload for item in everything.items} == {
            "/global/config/a": b"1",
            "/global/config/b": b"\xff",
            "/global/config/team/x": b"9",
            "/global/config/team/y": b"8",
        }
        assert everything.revision > 0
        assert [item.payload for item in (await load(pd, path="/global/config/team")).items] == [
            b"9",
            b"8",
        ]
        found, missing = (await load(pd, "x", "a", path="/global/config/team")).items
        assert (found.name, found.payload) == ("x", b"9")
        assert (missing.error.type, missing.error.message) == (
            pdpb_pb2.GLOBAL_CONFIG_NOT_FOUND,
            "key a not found",
        )


@pytest.mark.parametrize("path", ["/pd/", "/pd/1/raft", "/global/configs", "global/config/", "/"])
async def test_nothing_else_of_the_metadata_can_be_reached_as_settings(
    tmp_path: Path, path: str
) -> None:
    async with coordinator(tmp_path) as pd:
        requests = [
            pd.stub.StoreGlobalConfig(
                pdpb_pb2.StoreGlobalConfigRequest(config_path=path, changes=[Item(name="a")])
            ),
            pd.stub.LoadGlobalConfig(pdpb_pb2.LoadGlobalConfigRequest(config_path=path)),
            pd.stub.WatchGlobalConfig(pdpb_pb2.WatchGlobalConfigRequest(config_path=path)).read(),
        ]
        for call in requests:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details() == f'global config path "{path}" is not allowed'


async def test_resource_control_reads_its_settings_here_and_writes_them_elsewhere(
    tmp_path: Path,
) -> None:
    async with coordinator(tmp_path) as pd:
        with pytest.raises(grpc.aio.AioRpcError, match="is not allowed"):
            await store(pd, Item(name="degraded", value="1"), path="resource_group/ru_config")
        (missing,) = (await load(pd, "degraded", path="resource_group/ru_config")).items
        assert missing.error.type == pdpb_pb2.GLOBAL_CONFIG_NOT_FOUND
        await rpc_pb2_grpc.KVStub(pd.channel).Put(
            rpc_pb2.PutRequest(key=b"resource_group/ru_config/a", value=b"1")
        )
        assert [
            item.payload for item in (await load(pd, path="resource_group/ru_config")).items
        ] == [b"1"]


@pytest.mark.parametrize(
    "items", [[Item(name="a")] * 2, [Item(name=f"k{number}") for number in range(200)]]
)
async def test_settings_are_stored_all_or_none(tmp_path: Path, items: list[Item]) -> None:
    async with coordinator(tmp_path) as pd:
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"etcdserver: (duplicate key|too many operations)"
        ):
            await store(pd, *items)
        assert not (await load(pd)).items


async def test_watchers_see_changes_from_the_revision_they_loaded(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        loaded = (await load(pd)).revision
        await store(pd, Item(name="a", value="1"), Item(name="b", value="2"))
        await store(pd, Item(name="a", kind=pdpb_pb2.DELETE))
        call = pd.stub.WatchGlobalConfig(pdpb_pb2.WatchGlobalConfigRequest(revision=loaded + 1))
        seen: list[tuple[str, bytes, int]] = []
        while len(seen) < 3:
            answer = await call.read()
            seen += [(item.name[-1], item.payload, item.kind) for item in answer.changes]
        assert seen == [
            ("a", b"1", pdpb_pb2.PUT),
            ("b", b"2", pdpb_pb2.PUT),
            ("a", b"", pdpb_pb2.DELETE),
        ]
        call.cancel()


async def test_the_plain_door_gets_puts_deletes_and_watches(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        door: Any = meta_storagepb_pb2_grpc.MetaStorageStub(pd.channel)
        under = {"key": b"/x/", "range_end": b"/x0"}
        first = await door.Put(meta_storagepb_pb2.PutRequest(key=b"/x/a", value=b"1", prev_kv=True))
        assert not first.HasField("prev_kv")
        second = await door.Put(
            meta_storagepb_pb2.PutRequest(key=b"/x/a", value=b"2", prev_kv=True)
        )
        assert second.prev_kv.value == b"1"
        found = await door.Get(meta_storagepb_pb2.GetRequest(**under))
        assert [(pair.key, pair.value, pair.version) for pair in found.kvs] == [(b"/x/a", b"2", 2)]
        assert found.header.cluster_id == pd.cluster_id
        gone = await door.Delete(meta_storagepb_pb2.DeleteRequest(prev_kv=True, **under))
        assert (gone.deleted, [pair.value for pair in gone.prev_kvs]) == (1, [b"2"])
        start = first.header.revision
        call = door.Watch(
            meta_storagepb_pb2.WatchRequest(start_revision=start, prev_kv=True, **under)
        )
        events = []
        while len(events) < 3:
            events += (await call.read()).events
        assert [(event.type, event.kv.value, event.prev_kv.value) for event in events] == [
            (meta_storagepb_pb2.Event.PUT, b"1", b""),
            (meta_storagepb_pb2.Event.PUT, b"2", b"1"),
            (meta_storagepb_pb2.Event.DELETE, b"", b"2"),
        ]
        call.cancel()


async def test_the_plain_door_refuses_in_its_header(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        door: Any = meta_storagepb_pb2_grpc.MetaStorageStub(pd.channel)
        for call in [
            door.Put(meta_storagepb_pb2.PutRequest(value=b"1")),
            door.Put(meta_storagepb_pb2.PutRequest(key=b"a", lease=77)),
            door.Get(meta_storagepb_pb2.GetRequest(key=b"a", revision=1 << 40)),
            door.Delete(meta_storagepb_pb2.DeleteRequest()),
        ]:
            answer = await call
            assert answer.header.error.type == meta_storagepb_pb2.UNKNOWN
            assert answer.header.error.message.startswith("etcdserver: ")


async def test_a_watch_of_history_that_is_gone_says_from_where_it_is_kept(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as pd:
        for value in ("1", "2", "3"):
            await store(pd, Item(name="a", value=value))
        revision = (await load(pd)).revision
        await rpc_pb2_grpc.KVStub(pd.channel).Compact(rpc_pb2.CompactionRequest(revision=revision))
        door: Any = meta_storagepb_pb2_grpc.MetaStorageStub(pd.channel)
        async with aclosing(
            aiter(door.Watch(meta_storagepb_pb2.WatchRequest(key=b"a", start_revision=1)))
        ) as answers:
            (answer,) = [one async for one in answers]
        assert (answer.header.error.type, answer.compact_revision) == (
            meta_storagepb_pb2.DATA_COMPACTED,
            revision,
        )
        (answer,) = [
            one
            async for one in pd.stub.WatchGlobalConfig(
                pdpb_pb2.WatchGlobalConfigRequest(revision=1), timeout=60
            )
        ]
        assert answer.header.error.type == pdpb_pb2.DATA_COMPACTED
