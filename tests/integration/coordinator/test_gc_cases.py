"""PD's GC calls over gRPC, case by case: what today's PD answers,
and what the seed wants instead by default.

With TIDEMARK_TEST_PD_SERVER=/path/to/pd-server the table is also asked of a real PD, one new
cluster for each case.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import metapb_pb2, pdpb_pb2, pdpb_pb2_grpc

from gcsafepoint.state.compat import Compat
from tests.integration.coordinator.gc_cases import CASES, Call, Case, Refused, Status
from tests.integration.coordinator.gc_server import Asked, assert_answer, ours

PD_SERVER = os.environ.get("TIDEMARK_TEST_PD_SERVER", "")
OF_PD = [case for case in CASES if case.asked_of_pd]
NO_PD = pytest.param(
    OF_PD[0], marks=pytest.mark.skip(reason="TIDEMARK_TEST_PD_SERVER names no pd-server")
)
METHODS = sorted({case.question.method for case in CASES} - {"WatchGCSafePointV2"})


@asynccontextmanager
async def a_real_pd(directory: Path, port: int) -> AsyncIterator[Asked]:
    """A new PD with one store."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    flags = {
        "name": "pd1",
        "data-dir": directory / "data",
        "client-urls": client,
        "peer-urls": peer,
    }
    log = ["-L", "fatal", "--log-file", str(directory / "log")]
    arguments = [*(f"--{name}={value}" for name, value in flags.items()), *log]
    process = await asyncio.create_subprocess_exec(
        PD_SERVER, *arguments, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with grpc.aio.insecure_channel(client.removeprefix("http://")) as channel:
            stub = pdpb_pb2_grpc.PDStub(channel)
            header = pdpb_pb2.RequestHeader(cluster_id=await cluster_id_of(stub))
            store = metapb_pb2.Store(id=1, address="127.0.0.1:20160", version="8.5.0")
            epoch = metapb_pb2.RegionEpoch(conf_ver=1, version=1)
            region = metapb_pb2.Region(
                id=2, region_epoch=epoch, peers=[metapb_pb2.Peer(id=3, store_id=1)]
            )
            await stub.Bootstrap(
                pdpb_pb2.BootstrapRequest(header=header, store=store, region=region)
            )
            await asyncio.sleep(1)
            yield Asked(channel, header.cluster_id, None)
    finally:
        process.kill()
        await process.wait()


async def cluster_id_of(stub: Any) -> int:
    async with asyncio.timeout(30):
        while True:
            try:
                members = await stub.GetMembers(pdpb_pb2.GetMembersRequest(), wait_for_ready=True)
                if members.leader.client_urls:
                    return int(members.header.cluster_id)
            except grpc.aio.AioRpcError as err:
                if err.code() is not grpc.StatusCode.UNAVAILABLE:  # "server not started"
                    raise
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("compat", list(Compat))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_case_is_answered_as_the_table_says(
    tmp_path: Path, compat: Compat, case: Case
) -> None:
    async with ours(tmp_path, compat) as asked:
        for step in case.steps:
            await asked.take(step)
        expected = case.classic if compat is Compat.CLASSIC else case.pd9
        assert_answer(await asked.ask(case.question), expected)


@pytest.mark.parametrize("case", OF_PD if PD_SERVER else [NO_PD], ids=lambda case: case.name)
async def test_a_real_pd_answers_a_case_so(tmp_path: Path, case: Case) -> None:
    async with a_real_pd(tmp_path, 24_000 + 2 * CASES.index(case)) as asked:
        for step in case.steps:
            await asked.take(step)
        assert_answer(await asked.ask(case.question), case.pd9)


async def test_before_bootstrap_every_call_says_so_in_its_header(tmp_path: Path) -> None:
    async with ours(tmp_path, Compat.CLASSIC, bootstrapped=False) as asked:
        for method in METHODS:
            answer = await asked.ask(Call(method, {}))
            assert_answer(answer, Refused("cluster is not bootstrapped", "NOT_BOOTSTRAPPED"))


@pytest.mark.parametrize("theirs", [0, 8])
async def test_another_clusters_id_is_a_failed_precondition_of_every_call(
    tmp_path: Path, theirs: int
) -> None:
    expected = Status("FAILED_PRECONDITION", f"mismatch cluster id, need 7 but got {theirs}")
    async with ours(tmp_path, Compat.PD_9, bootstrapped=False) as asked:
        for method in METHODS:
            assert await asked.ask(Call(method, {}), theirs) == expected


async def test_no_global_barriers_and_not_asked_for_them_differ(tmp_path: Path) -> None:
    async with ours(tmp_path, Compat.CLASSIC) as asked:
        for wanted in (True, False):
            answer = await asked.ask(Call("GetGCState", {"include_global_gc_barriers": wanted}))
            assert answer.HasField("global_gc_barriers") == wanted
