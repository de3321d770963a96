"""PD's HTTP API on the client port, beside gRPC: both engines, plaintext and TLS,
over restarts and from followers.
"""

import asyncio
import json
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from server.coordinator.daemon import CoordinatorConfig, open_coordinator
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import AlreadyBootstrappedError, PdClient
from tests.integration.coordinator.clusters import Cluster, in_thread
from tests.integration.coordinator.processes import Coordinator, etcd_members
from tests.integration.coordinator.topology import a_region, a_store
from tests.ports import free_ports
from tests.unit.server.certificates import Certificates

PLAIN = SecurityConfig()
LABELS = "/pd/api/v1/config/region-label"
RULE = {
    "id": "schema/shop/cards",
    "index": 2,
    "labels": [{"key": "merge_option", "value": "deny"}, {"key": "db", "value": "shop"}],
    "rule_type": "key-range",
    "data": [{"start_key": "7480", "end_key": "7481"}],
}


@pytest.fixture(params=["native", "grpcio"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn."""
    monkeypatch.setenv("TIDEMARK_RPC_RPC_ENGINE", str(request.param))
    return str(request.param)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class Api:
    """A client of the HTTP API at one address; one connection a request."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._url = f"{'https' if tls else 'http'}://{address}"
        self._tls = tls

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and the body's JSON, or its text if it is none."""
        return await asyncio.to_thread(self._ask, method, path, body)

    async def get(self, path: str) -> Any:
        status, document = await self.ask("GET", path)
        assert status == 200, document
        return document

    def _ask(self, method: str, path: str, body: object) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._tls) as answer:
                return answer.status, parsed(answer.read())
        except urllib.error.HTTPError as err:
            with err:
                return err.code, parsed(err.read())


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


@asynccontextmanager
async def coordinator(
    directory: Path, security: SecurityConfig = PLAIN
) -> AsyncIterator[tuple[str, PdClient]]:
    """A bootstrapped cluster: its address, and a gRPC client of it."""
    config = CoordinatorConfig(addr="127.0.0.1:0", metadata=f"leveldb:{directory / 'meta'}")
    async with (
        open_coordinator(config, security) as bound,
        PdClient.open(bound["coordinator"], security) as pd,
    ):
        with suppress(AlreadyBootstrappedError):
            await pd.bootstrap(a_store(), a_region())
        yield bound["coordinator"], pd


@pytest.mark.usefixtures("engine")
async def test_what_tidb_asks_with_its_ddl_is_answered_and_kept(tmp_path: Path) -> None:
    """RENAME, TRUNCATE, DROP DATABASE and partition DDL read and patch label rules,
    over a connection beside gRPC's.
    """
    other = {**RULE, "id": "schema/shop", "index": 1}
    async with coordinator(tmp_path) as (address, pd):
        api = Api(address)
        assert await api.ask("GET", f"{LABELS}/rules/ids", [RULE["id"]]) == (200, [])
        patch = {"sets": [RULE, other], "deletes": ["schema/none"]}
        assert await api.ask("PATCH", f"{LABELS}/rules", patch) == (
            200,
            "Update region label rules successfully.",
        )
        assert await api.ask("POST", f"{LABELS}/rule", {**other, "index": 0}) == (
            200,
            "Update region label rule successfully.",
        )
        assert (await api.ask("GET", "/pd/api/v1/config/rule_group/tiflash"))[0] == 404
        group = {"id": "tiflash", "index": 120}
        assert (await api.ask("POST", "/pd/api/v1/config/rule_group", group))[0] == 200
        assert await pd.tso() > 0
    async with coordinator(tmp_path) as (address, _):
        api = Api(address)
        assert await api.get(f"{LABELS}/rules") == [{**other, "index": 0}, RULE]
        assert await api.ask("GET", f"{LABELS}/rules/ids", [RULE["id"], "x"]) == (200, [RULE])
        assert await api.get(f"{LABELS}/rule/schema%2Fshop%2Fcards") == RULE
        assert await api.get("/pd/api/v1/config/rule_group/tiflash") == group
        assert await api.ask("DELETE", f"{LABELS}/rule/schema%2Fshop%2Fcards") == (
            200,
            "Delete rule successfully.",
        )
        assert (await api.ask("DELETE", f"{LABELS}/rule/schema%2Fshop%2Fcards"))[0] == 404
        assert await api.ask(
            "PATCH", f"{LABELS}/rules", {"sets": None, "deletes": ["schema/shop"]}
        ) == (
            200,
            "Update region label rules successfully.",
        )
        assert await api.get(f"{LABELS}/rules") == []


async def test_placement_rules_groups_and_bundles_are_kept_and_given_back(tmp_path: Path) -> None:
    rule = {
        "group_id": "TiDB_DDL_71",
        "id": "p1",
        "index": 40,
        "start_key": "7480",
        "end_key": "7481",
        "role": "voter",
        "is_witness": False,
        "count": 3,
        "label_constraints": [{"key": "zone", "op": "in", "values": ["a"]}],
        "location_labels": ["zone", "host"],
    }
    bundle = {"group_id": "TiDB_DDL_71", "group_index": 40, "group_override": True, "rules": [rule]}
    config = "/pd/api/v1/config"
    async with coordinator(tmp_path) as (address, _):
        api = Api(address)
        [default] = await api.get(f"{config}/rules")
        assert (default["group_id"], default["id"], default["count"]) == ("pd", "default", 1)
        assert (await api.ask("POST", f"{config}/placement-rule?partial=true", [bundle]))[0] == 200
        assert (await api.ask("POST", f"{config}/rule", {**rule, "id": "p2"}))[0] == 200
    async with coordinator(tmp_path) as (address, _):
        api = Api(address)
        assert await api.get(f"{config}/placement-rule/TiDB_DDL_71") == {
            **bundle,
            "rules": [rule, {**rule, "id": "p2"}],
        }
        assert {one["group_id"] for one in await api.get(f"{config}/placement-rule")} == {
            "pd",
            "TiDB_DDL_71",
        }
        assert await api.get(f"{config}/rule/TiDB_DDL_71/p1") == rule
        delete = {
            "group_id": "TiDB_DDL_71",
            "id": "p",
            "action": "del",
            "delete_by_id_prefix": True,
        }
        assert (await api.ask("POST", f"{config}/rules/batch", [delete]))[0] == 200
        assert await api.get(f"{config}/rules/group/TiDB_DDL_71") == []
        assert (await api.ask("GET", f"{config}/rule/TiDB_DDL_71/p1"))[0] == 404
        assert await api.get(f"{config}/rule_groups") == [
            {"id": "TiDB_DDL_71", "index": 40, "override": True}
        ]
        assert (
            await api.ask("POST", f"{config}/placement-rule", [{**bundle, "group_id": "other"}])
        )[0] == 200
        assert [one["group_id"] for one in await api.get(f"{config}/placement-rule")] == ["other"]


async def test_the_cluster_is_shown_in_pds_shapes(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (address, pd):
        api = Api(address)
        await pd.update_service_gc_safe_point("ticdc", 600, 50)
        members = await api.get("/pd/api/v1/members")
        assert members["header"] == {"cluster_id": pd.cluster_id}
        assert members["leader"]["client_urls"] == [f"http://{address}"]
        assert members["leader"] in members["members"]
        [health] = await api.get("/pd/api/v1/health")
        assert (health["client_urls"], health["health"]) == ([f"http://{address}"], True)
        assert (await api.get("/pd/api/v1/version"))["version"].startswith("v8.")
        assert {"build_ts", "version", "git_hash", "start_timestamp"} <= set(
            await api.get("/pd/api/v1/status")
        )
        stores = await api.get("/pd/api/v1/stores")
        assert stores["count"] == len(stores["stores"]) == 1
        [store] = stores["stores"]
        assert (store["store"]["id"], store["store"]["address"]) == (1, "127.0.0.1:20160")
        assert store["status"]["region_count"] == 1
        assert await api.get("/pd/api/v1/store/1") == store
        assert (await api.ask("GET", "/pd/api/v1/store/7"))[0] == 404
        [region] = (await api.get("/pd/api/v1/regions"))["regions"]
        assert (region["id"], region["start_key"], region["epoch"]) == (
            2,
            "",
            {"conf_ver": 1, "version": 1},
        )
        assert await api.get("/pd/api/v1/region/id/2") == region
        assert await api.get("/pd/api/v1/region/key/%FFx") == region
        assert (await api.get("/pd/api/v1/regions/key?key=%FF&end_key=&limit=5"))["count"] == 1
        assert (await api.get("/pd/api/v1/stats/region?start_key=&end_key="))["count"] == 1
        assert (await api.get("/pd/api/v1/config/replicate"))["max-replicas"] == 1
        assert (await api.get("/pd/api/v1/config"))["replication"][
            "enable-placement-rules"
        ] == "true"
        points = await api.get("/pd/api/v1/gc/safepoint")
        assert "ticdc" in {one["service_id"] for one in points["service_gc_safe_points"]}
        assert (await api.ask("DELETE", "/pd/api/v1/gc/safepoint/ticdc"))[0] == 200
        points = await api.get("/pd/api/v1/gc/safepoint")
        assert "ticdc" not in {one["service_id"] for one in points["service_gc_safe_points"]}


@pytest.mark.usefixtures("engine")
async def test_bad_requests_get_clear_answers_and_change_nothing(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (address, _):
        api = Api(address)
        for rule, said in (
            ({**RULE, "id": ""}, "empty rule id"),
            ({**RULE, "labels": []}, "no region labels"),
            ({**RULE, "labels": [{"key": "", "value": "x"}]}, "empty region label key"),
            ({**RULE, "rule_type": "x"}, "invalid rule type: x"),
            ({**RULE, "data": []}, "no key ranges"),
            ({**RULE, "data": [{"start_key": "xy", "end_key": ""}]}, "decode string xy error"),
            (
                {**RULE, "data": [{"start_key": "02", "end_key": "01"}]},
                "endKey should be greater than startKey",
            ),
            ({**RULE, "index": "1"}, "index must be a number"),
            ({**RULE, "id": "\ud800"}, "no Unicode text"),
            (["x"], "a label rule is a JSON object"),
        ):
            status, text = await api.ask("POST", f"{LABELS}/rule", rule)
            assert (status, said in str(text)) == (400, True), text
        for path, body in (("rules", 5), ("rules", {"sets": 5}), ("rules", {"deletes": [5]})):
            assert (await api.ask("PATCH", f"{LABELS}/{path}", body))[0] == 400
        placement = {"group_id": "g", "id": "i", "role": "king", "count": 1}
        for path in ("rule", "rules", "rules/batch", "placement-rule", "rule_group"):
            assert (await api.ask("POST", f"/pd/api/v1/config/{path}", placement | {"id": 1}))[
                0
            ] == 400, path
        assert (await api.ask("GET", "/pd/api/v1/nothing"))[0] == 404
        assert (await api.ask("GET", "/"))[0] == 404
        assert (await api.ask("POST", "/pd/api/v1/stores", {}))[0] == 405
        assert await api.get(f"{LABELS}/rules") == []


RAW = {
    "no HTTP": (b"GET nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "a header without an end": (b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 17), b"HTTP/1.1 431 "),
    "a huge body": (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 413 ",
    ),
    "huge chunks": (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"500001\r\n" + b"x" * 0x500001 + b"\r\n",
        b"HTTP/1.1 413 ",
    ),
    "two requests at once": (b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n" * 2, b"HTTP/1.1 404 "),
    "a byte at a time": (b"", b"HTTP/1.1 404 "),
}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", RAW)
async def test_raw_bytes_get_an_answer_and_nobody_else_notices(tmp_path: Path, name: str) -> None:
    sent, expected = RAW[name]
    async with coordinator(tmp_path) as (address, pd):
        answer = await asyncio.to_thread(talk, address, sent)
        assert answer.startswith(expected), answer[:200]
        if name == "two requests at once":
            assert answer.count(expected) == 2
        assert await pd.tso() > 0


def talk(address: str, sent: bytes) -> bytes:
    """What a server answers until it closes, or to the end of what it says."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if sent:
                connection.sendall(sent)
            for byte in (
                b"" if sent else b"DELETE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            ):
                connection.sendall(bytes([byte]))
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is refused before all of it was sent
        received = b""
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            pass
        return received


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "offered", [None, ["http/1.1"], ["h2", "http/1.1"]], ids=["no ALPN", "http/1.1", "both"]
)
async def test_over_tls_alpn_tells_http_from_grpc(
    tmp_path: Path, certificates: Certificates, offered: list[str] | None
) -> None:
    security = certificates.security(ca=True)
    async with coordinator(tmp_path, security) as (address, pd):
        context = certificates.client(certificate=True)
        if offered is not None:
            context.set_alpn_protocols(offered)
        stores = await in_thread(raw_get, address, context, "/pd/api/v1/stores")
        assert b"HTTP/1.1 200 " in stores
        assert b'"count": 1' in stores
        assert await pd.tso() > 0
        members = await Api(address, certificates.client(certificate=True)).get(
            "/pd/api/v1/members"
        )
        assert members["leader"]["client_urls"] == [f"https://{address}"]


@pytest.mark.usefixtures("engine")
async def test_over_mtls_nobody_without_a_certificate_is_answered(
    tmp_path: Path, certificates: Certificates
) -> None:
    async with coordinator(tmp_path, certificates.security(ca=True)) as (address, pd):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await in_thread(
                raw_get, address, certificates.client(certificate=False), "/pd/api/v1/stores"
            )
        assert not await asyncio.to_thread(
            talk, address, b"GET /pd/api/v1/stores HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        assert await pd.tso() > 0


def raw_get(address: str, context: ssl.SSLContext, path: str) -> bytes:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        received = b""
        while data := connection.recv(65536):
            received += data
        if not received:
            raise ConnectionError("closed without an answer")
        return received


@pytest.mark.usefixtures("engine")
async def test_curl_and_a_kept_connection_are_served(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as (address, _):
        urls = [f"http://{address}/pd/api/v1/{path}" for path in ("version", "members", "stores")]
        command = ["curl", "-sS", "-v", "--max-time", "60", *urls]
        done = await in_thread(
            subprocess.run, command, capture_output=True, timeout=120, check=True
        )
        assert done.stderr.count(b"Connected to") == 1
        assert done.stderr.count(b"200 OK") == 3
        expecting = [
            "curl",
            "-sS",
            "-H",
            "Expect: 100-continue",
            "-d",
            "{}",
            f"http://{address}{LABELS}/rule",
        ]
        done = await in_thread(
            subprocess.run, expecting, capture_output=True, timeout=120, check=True
        )
        assert b"empty rule id" in done.stdout


async def test_a_follower_sends_clients_to_the_leader(tmp_path: Path) -> None:
    with etcd_members(tmp_path, 1) as (etcd,):
        coordinators = [
            Coordinator(f"127.0.0.1:{port}", f"etcd://{etcd.address}", tmp_path / f"{port}.log")
            for port in free_ports(2)
        ]
        try:
            for one in coordinators:
                one.launch()
            cluster = Cluster([etcd], coordinators)
            await in_thread(cluster.wait_listening)
            leader = await in_thread(cluster.leader)
            [follower] = [one for one in coordinators if one is not leader]
            deadline = time.monotonic() + 60
            command = [
                "curl",
                "-sS",
                "-L",
                "-d",
                json.dumps(RULE),
                f"http://{follower.address}{LABELS}/rule",
            ]
            while (
                b"successfully"
                not in (await in_thread(subprocess.run, command, capture_output=True)).stdout
            ):
                assert time.monotonic() < deadline  # it may not know the leader yet
            assert await Api(leader.address).get(f"{LABELS}/rules") == [RULE]
            assert await Api(follower.address).get(f"{LABELS}/rules") == [RULE]
        finally:
            for one in coordinators:
                one.kill()
