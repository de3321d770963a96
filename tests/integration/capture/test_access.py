"""Clients with roles on real captures: gRPC, HTTP, Flight, the command line, and captures that call
each other.
"""

import base64
import http.client
import json
import subprocess
import time
from types import SimpleNamespace

import grpc
import pyarrow.flight as fl
import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1 import gc_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.gc_pb2_grpc import GCServiceStub

from storage.tidb.record import encode_record
from tests.integration.capture.many_tables import NAMES, TABLES
from tests.integration.capture.processes import (
    COMMAND,
    LOOPBACK,
    Reader,
    patiently,
    running_cluster,
    transaction_client,
)

CLIENTS = {
    "dashboard": ("read",),
    "operator": ("operate",),
    "shop-lake": ("lake", "--changefeed", "shop-*"),
    "captures": ("admin",),
    "boss": ("admin",),
}
PATIENCE_S = 60


def command_line(*arguments):
    """Exit status, standard output, standard error."""
    done = subprocess.run(
        [*COMMAND, "cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    directory = tmp_path_factory.mktemp("access")
    file, tokens = directory / "access.toml", {}
    for name, role in CLIENTS.items():
        path = directory / f"{name}.token"
        made = command_line(
            "access",
            "create",
            name,
            "--role",
            *role,
            "--access-file",
            file,
            "--new-token-file",
            path,
        )
        assert made.status == 0, made.err
        tokens[name] = path.read_text().strip()
        assert path.stat().st_mode & 0o777 == 0o600
        assert tokens[name] not in made.out + file.read_text()
    flags = ["--access-file", str(file), "--token-file", str(directory / "captures.token")]
    with running_cluster(directory, *flags) as running:
        running.access_file, running.tokens, running.flags = file, tokens, flags
        running.second = running.start(
            "capture", "--coordinator", running.pd, "--data-dir", str(directory / "second"), *flags
        )
        for name in ("shop-1", "bank"):
            create = pb.CreateChangefeedRequest(
                id=name,
                sink_uri="delta:///lake",
                tables=[
                    pb.Table(schema_name="many", table_info_json=table.to_json())
                    for table in TABLES
                ],
            )
            # By the capture that may not be the owner: it passes the call on with its own token.
            called(running, "CreateChangefeed", create, "boss", running.second)
        yield running


def called(cluster, method, request, client="", capture=None):
    """A call of the changefeed API with a client's token."""
    metadata = [("authorization", f"Bearer {cluster.tokens.get(client, client)}")] if client else []
    address = (capture or cluster.capture).endpoints["capture"]
    with grpc.insecure_channel(address) as channel:
        call = getattr(ChangefeedServiceStub(channel), method)
        return call(request, timeout=60, wait_for_ready=True, metadata=metadata)


def refusal(call, *arguments):
    with pytest.raises(grpc.RpcError) as refused:
        call(*arguments)
    return refused.value.code().name, refused.value.details()


def asked(address, method, path, authorization="", body=None):
    """A request as curl sends it: status, headers, body."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        headers = {"Authorization": authorization} if authorization else {}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_grpc_tells_who_calls_and_what_may_be_called(cluster):
    listing = pb.ListChangefeedsRequest()
    code, details = refusal(called, cluster, "ListChangefeeds", listing)
    assert (code, "bring a token" in details) == ("UNAUTHENTICATED", True)
    code, details = refusal(called, cluster, "ListChangefeeds", listing, "no-such-token")
    assert code == "UNAUTHENTICATED"
    assert "no-such-token" not in details
    for client, seen in (("dashboard", ["bank", "shop-1"]), ("shop-lake", ["shop-1"])):
        for capture in (cluster.capture, cluster.second):
            listed = called(cluster, "ListChangefeeds", listing, client, capture).changefeeds
            assert sorted(each.id for each in listed) == seen

    pause = pb.PauseChangefeedRequest(id="shop-1")
    code, details = refusal(called, cluster, "PauseChangefeed", pause, "dashboard")
    assert code == "PERMISSION_DENIED"
    assert details.startswith(
        "[TM:ErrUnauthorized] client 'dashboard' has the role read, which may"
    )
    for capture in (cluster.capture, cluster.second):
        called(cluster, "PauseChangefeed", pause, "operator", capture)
        called(
            cluster,
            "ResumeChangefeed",
            pb.ResumeChangefeedRequest(id="shop-1"),
            "operator",
            capture,
        )
    code, _ = refusal(
        called, cluster, "RemoveChangefeed", pb.RemoveChangefeedRequest(id="shop-1"), "operator"
    )
    assert code == "PERMISSION_DENIED"
    audit = cluster.capture.log.read_text() + cluster.second.log.read_text()
    assert '"client": "operator"' in audit
    assert not any(token in audit for token in cluster.tokens.values())


def test_the_http_api_asks_for_the_same_rights(cluster):
    address = cluster.capture.endpoints["capture"]
    status, headers, _ = asked(address, "GET", "/api/v2/changefeeds")
    assert (status, "Basic" in headers["WWW-Authenticate"]) == (401, True)
    basic = base64.b64encode(f"anyone:{cluster.tokens['dashboard']}".encode()).decode()
    for bearer in (f"Bearer {cluster.tokens['dashboard']}", f"Basic {basic}"):
        status, _, body = asked(address, "GET", "/api/v2/changefeeds", bearer)
        assert (status, json.loads(body)["total"]) == (200, 2)
        status, _, body = asked(address, "POST", "/api/v2/changefeeds/bank/pause", bearer)
        assert (status, json.loads(body)["error_code"]) == (403, "CDC:ErrUnauthorized")
    status, _, _ = asked(address, "GET", "/api/v2/changefeeds/bank", "Bearer wrong")
    assert status == 401
    shop = f"Bearer {cluster.tokens['shop-lake']}"
    assert asked(address, "GET", "/api/v2/changefeeds/bank", shop)[0] == 403
    assert json.loads(asked(address, "GET", "/api/v2/changefeeds", shop)[2])["total"] == 1
    assert asked(address, "GET", "/api/v2/health")[0] == 200
    for path in ("/api/v2/tso", "/api/v2/status", "/console.json", "/api/v2/processors"):
        method = "POST" if path.endswith("tso") else "GET"
        assert asked(address, method, path)[0] == 401
        assert asked(address, method, path, shop)[0] == 200
    document = json.loads(asked(address, "GET", "/console.json", shop)[2])
    assert ([each["id"] for each in document["changefeeds"]], document["gc"]) == (["shop-1"], None)


def test_the_level_of_the_log_takes_an_operator(cluster):
    address = cluster.capture.endpoints["http"]
    assert asked(address, "GET", "/metrics")[0] == 200
    assert asked(address, "GET", "/log-level")[0] == 401
    assert asked(address, "GET", "/log-level", f"Bearer {cluster.tokens['dashboard']}")[0] == 200
    for client, status in (("dashboard", 403), ("operator", 200)):
        bearer = f"Bearer {cluster.tokens[client]}"
        assert asked(address, "PUT", "/log-level", bearer, b"info")[0] == status


def test_flight_gives_rows_of_the_readers_own_changefeeds_only(cluster):
    def reader(changefeed, client):
        return Reader(cluster, changefeed, cluster.tokens.get(client, client))

    for changefeed, client in (("shop-1", "shop-lake"), ("shop-1", "boss"), ("bank", "boss")):
        described = patiently(reader(changefeed, client).ask, "describe")
        assert described["changefeed"] == changefeed
    for refused in (reader("shop-1", ""), reader("shop-1", "wrong")):
        with pytest.raises(fl.FlightUnauthenticatedError, match="ErrUnauthenticated"):
            refused.ask("describe")
    for changefeed, client, told in (
        ("bank", "shop-lake", "is for the changefeeds shop-"),
        ("shop-1", "dashboard", "role read, which may not read rows"),
        ("shop-1", "operator", "role operate"),
    ):
        with pytest.raises(fl.FlightUnauthorizedError, match=told):
            reader(changefeed, client).ask("describe")
        with pytest.raises(fl.FlightUnauthorizedError, match=told):
            reader(changefeed, client).read(1, 2, NAMES[0])
        with pytest.raises(fl.FlightUnauthorizedError, match=told):
            reader(changefeed, client).ask("ack", ts=1)


def test_captures_with_tokens_of_their_own_share_tables(cluster):
    pytest.importorskip("tikv_client")
    with transaction_client(cluster) as store:
        txn = store.begin(pessimistic=False)
        for table in TABLES:
            txn.put(*encode_record(table, {"id": 1, "v": 1}))
        txn.commit()
    reader = Reader(cluster, "shop-1", cluster.tokens["shop-lake"])
    deadline = time.monotonic() + PATIENCE_S
    locations = set()
    while len(locations) < 2:
        assert time.monotonic() < deadline, "the tables are not divided"
        described = patiently(reader.ask, "describe")
        start = described["checkpoint_ts"]
        end = patiently(reader.ask, "latest", start=start, wait_ms=1000)["ts"]
        parts = patiently(reader.ask, "plan", start=start, end=end)["slices"] if end > start else []
        locations = {part["locations"][0] for part in parts}
    for part in parts:
        rows = patiently(reader.read, start, end, part["table"], part["locations"][0])
        assert rows.num_rows == part["rows"]


def test_the_command_line_brings_a_token(cluster):
    flags = ["--server", cluster.capture.endpoints["capture"], "--pd", cluster.pd]
    without = command_line(*flags, "changefeed", "list")
    assert (without.status, "[TM:ErrUnauthenticated]" in without.err) == (1, True)
    path = cluster.directory / "dashboard.token"
    listed = command_line(*flags, "--token-file", path, "--json", "changefeed", "list")
    assert sorted(each["id"] for each in json.loads(listed.out)) == ["bank", "shop-1"]
    paused = command_line(*flags, "--token-file", path, "changefeed", "pause", "-c", "bank")
    assert (paused.status, "[TM:ErrUnauthorized]" in paused.err) == (1, True)
    missing = command_line(*flags, "--token-file", "/none", "changefeed", "list")
    assert (missing.status, "[TM:ErrTokenFile]" in missing.err) == (1, True)


def test_the_gc_worker_asks_too(cluster):
    worker = cluster.start(
        "gc-worker", "--coordinator", cluster.pd, "--access-file", str(cluster.access_file)
    )

    def rounds(method, request, client):
        metadata = [("authorization", f"Bearer {cluster.tokens[client]}")] if client else []
        with grpc.insecure_channel(worker.endpoints["gc-worker"]) as channel:
            call = getattr(GCServiceStub(channel), method)
            return call(request, timeout=60, wait_for_ready=True, metadata=metadata)

    rounds("GetGCConfig", gc_pb2.GetGCConfigRequest(), "dashboard")
    assert refusal(rounds, "GetGCConfig", gc_pb2.GetGCConfigRequest(), "")[0] == "UNAUTHENTICATED"
    life = gc_pb2.SetGCConfigRequest(variables={"tikv_gc_life_time": "20m0s"})
    for client in ("dashboard", "operator"):
        assert refusal(rounds, "SetGCConfig", life, client)[0] == "PERMISSION_DENIED"
    rounds("SetGCConfig", life, "boss")


def reloads_of(capture):
    """How often a capture says it has read its file again."""
    metrics = asked(capture.endpoints["http"], "GET", "/metrics")[2].decode()
    name = 'tidemark_rpc_access_reloads_total{outcome="ok"}'
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    return float(lines.get(name, 0))


def test_a_client_that_is_taken_out_of_the_file_is_refused_within_seconds(cluster):
    text = cluster.access_file.read_text()
    first, _, rest = text.partition("\n\n")
    assert 'name = "dashboard"' in first
    called(cluster, "ListChangefeeds", pb.ListChangefeedsRequest(), "dashboard")
    reloads = reloads_of(cluster.capture)
    cluster.access_file.write_text(rest)
    try:
        let_in_becomes(cluster, "dashboard", False)
        # Both ports have it from one reading.
        boss = f"Bearer {cluster.tokens['boss']}"
        assert asked(cluster.capture.endpoints["http"], "GET", "/log-level", boss)[0] == 200
        assert reloads_of(cluster.capture) == reloads + 1
    finally:
        cluster.access_file.write_text(text)
        let_in_becomes(cluster, "dashboard", True)


def let_in_becomes(cluster, client, wanted):
    """Wait until all captures let a client in, or none does."""
    deadline = time.monotonic() + PATIENCE_S
    for capture in (cluster.capture, cluster.second):
        while True:
            try:
                called(cluster, "ListChangefeeds", pb.ListChangefeedsRequest(), client, capture)
                let_in = True
            except grpc.RpcError as err:
                assert err.code() is grpc.StatusCode.UNAUTHENTICATED  # noqa: PT017 - any other is a fault
                let_in = False
            if let_in is wanted:
                break
            assert time.monotonic() < deadline, f"let in: {let_in}"
            time.sleep(0.1)


def test_a_capture_does_not_start_with_a_file_that_it_cannot_use(cluster, tmp_path):
    (tmp_path / "access.toml").write_text("[[client]]\nname = 'x'\n")
    (tmp_path / "token").write_text("t")
    for flags, told in (
        (["--access-file", tmp_path / "access.toml"], "[TM:ErrAccessFile]"),
        (["--access-file", tmp_path / "none"], "[TM:ErrAccessFile]"),
        (["--token-file", tmp_path / "none"], "[TM:ErrTokenFile]"),
        (
            ["--access-file", cluster.access_file, "--flight-token-file", tmp_path / "token"],
            "[TM:ErrConfigInvalid]",
        ),
    ):
        listens = [
            part for name in ("", "flight-", "http-") for part in (f"--{name}addr", LOOPBACK)
        ]
        own = ["--coordinator", cluster.pd, "--data-dir", tmp_path / "data", *listens, *flags]
        done = subprocess.run(
            [*COMMAND, "capture", *map(str, own)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert told in done.stderr
