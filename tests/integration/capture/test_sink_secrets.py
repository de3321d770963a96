"""A password in a sink URI: refused at create; one in an old record is shown nowhere,
and can be mended.
"""

import json
import subprocess

import grpc
import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.demo.bank import ACCOUNTS
from tests.integration.capture.processes import Cluster, Reader, running_cluster

SECRET = "geheim-12345"
INFO = "/tidemark/default/changefeed/info/"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def etcd(cluster: Cluster, *arguments: str, given: str | None = None) -> str:
    command = ["etcdctl", "--endpoints", cluster.pd, *arguments]
    environment = {"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    content = given.encode() if given else None
    done = subprocess.run(
        command, input=content, capture_output=True, timeout=60, check=True, env=environment
    )
    return done.stdout.decode(errors="replace")


def create(cluster: Cluster, name: str, sink_uri: str):
    tables = [pb.Table(schema_name="bank", table_info_json=ACCOUNTS.to_json())]
    return cluster.api(
        "CreateChangefeed", pb.CreateChangefeedRequest(id=name, sink_uri=sink_uri, tables=tables)
    )


@pytest.mark.parametrize(
    "uri",
    [
        f"postgresql://u:{SECRET}@h/d",
        f"mysql://u:{SECRET}@h/d",
        f"delta:///lake?password={SECRET}",
        f"postgresql://h/d?user=u&password={SECRET}",
        f"jdbc:mysql://u:{SECRET}@h/d",
    ],
)
def test_a_sink_uri_with_a_password_is_not_stored(cluster, uri):
    with pytest.raises(grpc.RpcError) as refused:
        create(cluster, "refused", uri)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ErrSinkURIInvalid" in refused.value.details()
    assert SECRET not in refused.value.details()
    assert SECRET not in etcd(cluster, "get", "--prefix", "")


@pytest.mark.parametrize(
    "uri", ["http://169.254.169.254/", "jdbc:x", "delta:///etc/cron.d", "delta://relative/x"]
)
def test_what_is_no_sink_is_refused_by_the_api(cluster, uri):
    with pytest.raises(grpc.RpcError, match="ErrSinkURIInvalid"):
        create(cluster, "refused", uri)


def test_a_secret_in_an_old_record_is_shown_nowhere_and_mended_by_update(cluster):
    create(cluster, "old", "postgresql://u@127.0.0.1/d")
    record = json.loads(etcd(cluster, "get", "--print-value-only", INFO + "old"))
    record["sink_uri"] = f"postgresql://u:{SECRET}@127.0.0.1/d"
    cluster.capture.terminate()
    etcd(cluster, "put", INFO + "old", given=json.dumps(record))
    cluster.capture.start()

    asked = [
        cluster.cli("changefeed", *verb)
        for verb in (("list",), ("query", "-c", "old"), ("pause", "-c", "old"))
    ]
    asked.append(cluster.cli("changefeed", "resume", "-c", "old", "--yes"))
    asked.append(cluster.cli("verify", "-c", "old"))
    asked.append(Reader(cluster, "old").ask("describe"))
    shown = json.dumps(asked) + cluster.capture.log.read_text()
    assert SECRET not in shown
    assert asked[1]["sink_uri"] == "postgresql://u:***@127.0.0.1/d"
    assert "changefeed update -c old" in asked[1]["warnings"][0]
    assert "changefeed update -c old" in asked[4]
    assert "changefeed update -c old" in cluster.capture.log.read_text()

    elsewhere = cluster.cli(
        "changefeed", "update", "-c", "old", "--sink-uri", "postgresql://u@127.0.0.2/d"
    )
    assert "ErrSinkURIInvalid" in elsewhere
    assert SECRET not in elsewhere
    mended = cluster.cli(
        "changefeed",
        "update",
        "-c",
        "old",
        "--sink-uri",
        "postgresql://u@127.0.0.1/d?password-file=/run/lake",
    )
    assert mended["sink_uri"].endswith("?password-file=/run/lake")
    assert "warnings" not in mended
    assert SECRET not in etcd(cluster, "get", "--prefix", "")
    cluster.capture.terminate()
    cluster.capture.start()
    assert cluster.cli("changefeed", "query", "-c", "old")["sink_uri"] == mended["sink_uri"]
