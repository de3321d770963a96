"""A whole cluster whose coordinator, store and pump know their clients: its daemons go on by their
certificates, and whoever may only look changes nothing.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2, pdpb_pb2
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tipb import pump_pb2

from server.rpc.access_list import digest
from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.certificates import Certificates

LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")
TABLE = TableInfo.build(101, "accounts", [Column.bigint("id"), Column.bigint("balance")])
CALLS = {
    "coordinator": (
        "/pdpb.PD/UpdateGCSafePoint",
        pdpb_pb2.UpdateGCSafePointRequest(safe_point=1 << 60),
    ),
    "store": ("/tikvpb.Tikv/RawPut", kvrpcpb_pb2.RawPutRequest(key=b"k", value=b"v")),
    "pump": ("/binlog.Pump/WriteBinlog", pump_pb2.WriteBinlogReq()),
}

pytestmark = pytest.mark.timeout(400)


async def status(address, security, method, request, token=""):
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with connect(address, security) as channel:
        try:
            await channel.unary_unary(method)(
                request.SerializeToString(), timeout=60, metadata=metadata
            )
        except grpc.aio.AioRpcError as err:
            return err.code().name
    return "OK"


async def test_a_cluster_runs_by_its_certificates_and_others_may_only_look(tmp_path):
    certificates = Certificates(tmp_path)
    own, visitor = certificates.security(ca=True), certificates.sign("visitor")
    access = tmp_path / "access.toml"
    access.write_text(
        "[[client]]\nname='cluster'\nrole='cluster'\ncommon-name='node'\n"
        f"[[client]]\nname='panel'\nrole='read'\ntoken-sha256='{digest(b'looks')}'\n"
    )
    files = {
        f"TIDEMARK_{name}_ACCESS_FILE": str(access) for name in ("COORDINATOR", "STORE", "PUMP")
    }
    flags = [part for name in LISTENERS for part in (f"--{name}-addr", "127.0.0.1:0")]
    flags += ["--ca-path", own.ca_path, "--cert-path", own.cert_path, "--key-path", own.key_path]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.cli.main", "up", "--no-spark"),
        *("--data-dir", str(tmp_path / "data"), *flags),
        stdout=PIPE,
        stderr=DEVNULL,
        env=os.environ | files,
    )
    try:
        async with asyncio.timeout(300):
            endpoints = json.loads(await process.stdout.readline())["endpoints"]
            await _is_replicated(endpoints, own)
            for name, (method, request) in CALLS.items():
                address = endpoints[name]
                assert await status(address, visitor, method, request) == "UNAUTHENTICATED", name
                told = await status(address, visitor, method, request, "looks")
                assert told == "PERMISSION_DENIED", name
                told = await status(address, own, method, request)
                assert told not in ("UNAUTHENTICATED", "PERMISSION_DENIED"), name
            members = "/pdpb.PD/GetMembers", pdpb_pb2.GetMembersRequest()
            assert await status(endpoints["coordinator"], visitor, *members, "looks") == "OK"
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


async def _is_replicated(endpoints, own):
    """A changefeed of the cluster gets on: capture, coordinator and store talk to each other."""
    async with PdClient.open(endpoints["coordinator"], own) as pd:
        start_ts = await pd.tso()
        assert (await pd.update_service_gc_safe_point("br", 60, start_ts)).safe_point <= start_ts
    async with connect(endpoints["capture"], own) as channel:
        changefeeds = ChangefeedServiceStub(channel)
        table = pb.Table(schema_name="bank", table_info_json=TABLE.to_json())
        await changefeeds.CreateChangefeed(
            pb.CreateChangefeedRequest(id="feed", sink_uri="delta:///lake", tables=[table])
        )
        while True:
            found = await changefeeds.QueryChangefeed(pb.QueryChangefeedRequest(id="feed"))
            if found.changefeed.resolved_ts > start_ts:
                return
