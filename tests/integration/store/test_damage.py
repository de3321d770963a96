"""A store with a damaged file answers no wrong data, says which file,
and goes on with everything else.
"""

from pathlib import Path

import grpc.aio
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from storage.leveldb_files import read_index
from tests.integration.store.daemons import Cluster, failed, running_cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

ROWS = 600


def value(handle: int) -> bytes:
    return b"%06d" % handle * 50


async def filled(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        for first in range(0, ROWS, 100):
            start_ts, keys = (
                await stubs.pd.tso(),
                [row_key(101, at) for at in range(first, first + 100)],
            )
            prewrite = kvrpcpb.PrewriteRequest(
                context=await stubs.context(keys[0]),
                mutations=[
                    kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value(first + at))
                    for at, key in enumerate(keys)
                ],
                primary_lock=keys[0],
                start_version=start_ts,
                lock_ttl=3000,
                try_one_pc=True,
            )
            assert (await stubs.tikv.KvPrewrite(prewrite)).one_pc_commit_ts
    cluster.store.stop()


def damage(data_dir: Path) -> Path:
    """Flip a bit in a block of values."""
    for path in sorted((data_dir / "mvcc").glob("*.ldb")):
        blocks = [
            block
            for block in read_index(path)
            if block.last_key.startswith(b"d") and block.size > 100
        ]
        if blocks:
            data = bytearray(path.read_bytes())
            data[blocks[len(blocks) // 2].offset + 50] ^= 4
            path.write_bytes(data)
            return path
    raise AssertionError("no table holds values")


async def read_all(stubs: Stubs) -> list[str]:
    """The errors of reading every row; what is read is right."""
    errors = []
    for handle in range(ROWS):
        try:
            assert (await stubs.get(row_key(101, handle))).value == value(handle)
        except grpc.aio.AioRpcError as err:
            errors.append(f"{err.code().name} {err.details()}")
    return errors


async def test_a_flipped_bit_is_never_served_and_the_rest_of_the_store_goes_on(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path, "--split-keys", "") as cluster:
        await filled(cluster)
        cluster.restart_store()  # which writes its log into a table
        cluster.store.stop()
        path = damage(tmp_path / "store")
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            await stubs.put(row_key(102, 1), b"new")
            assert (await stubs.get(row_key(102, 1))).value == b"new"
            errors = await read_all(stubs)
            assert 0 < len(errors) < ROWS // 4
            assert all(text.startswith("DATA_LOSS [TM:ErrDatabaseCorrupt]") for text in errors)
            assert all(f"{path} is damaged at byte" in text for text in errors)

            async def requests() -> "grpc.aio.AsyncIterator[tikvpb.BatchCommandsRequest]":
                gets = [
                    kvrpcpb.GetRequest(context=context, key=row_key(101, handle), version=now_ts)
                    for handle in range(ROWS)
                ]
                ids = range(1, ROWS + 1)
                yield tikvpb.BatchCommandsRequest(
                    request_ids=ids,
                    requests=[tikvpb.BatchCommandsRequest.Request(Get=get) for get in gets],
                )

            context, now_ts = await stubs.context(row_key(101, 0)), await stubs.pd.tso()
            answers = [message async for message in stubs.tikv.BatchCommands(requests())]
            gets = {
                at - 1: part.Get
                for each in answers
                for at, part in zip(each.request_ids, each.responses, strict=True)
            }
            refused = [at for at, get in gets.items() if get.HasField("region_error")]
            assert len(refused) == len(errors)
            assert "[TM:ErrDatabaseCorrupt]" in gets[refused[0]].region_error.message
            assert all(gets[at].value == value(at) for at in range(ROWS) if at not in refused)
        assert cluster.store.process.poll() is None


async def test_a_store_with_a_damaged_log_does_not_start_and_names_the_file(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--split-keys", "") as cluster:
        await filled(cluster)
        log = max((tmp_path / "store" / "mvcc").glob("*.log"), key=lambda path: path.stat().st_size)
        whole = log.read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 4
        log.write_bytes(data)
        status, said = failed("store", *cluster.store.arguments)
        assert status == 1
        assert "[TM:ErrDatabaseCorrupt]" in said
        assert f"{log} is damaged at byte" in said
        assert "from a backup" in said
        log.write_bytes(whole)  # the printed way out: the file from a backup
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            assert await read_all(stubs) == []
