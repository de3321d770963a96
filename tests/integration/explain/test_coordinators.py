"""The coordinator's HTTP port where it must say no: on a follower,
and to whoever has no certificate.
"""

import http.client
import json
import subprocess
import time
import urllib.request

import pytest

from tests.integration.capture.processes import COMMAND, Daemon
from tests.integration.coordinator.conftest import running_etcd
from tests.unit.server.certificates import Certificates


def ask(daemon, path, method="GET", context=None):
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind(
        daemon.endpoints["http"], timeout=60, **({"context": context} if context else {})
    )
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.fixture
def started(tmp_path):
    daemons = []

    def start(name, *flags):
        (tmp_path / name).mkdir()
        daemons.append(Daemon(tmp_path / name, "coordinator", *flags))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()


def test_a_follower_names_the_leader(started, tmp_path):
    with running_etcd(tmp_path / "etcd") as etcd:
        metadata = ("--metadata", f"etcd://{etcd}")
        both = [started("a", *metadata), started("b", *metadata)]
        deadline = time.monotonic() + 60
        while (answers := {ask(one, "/pd/api/v1/gc/safepoint")[0] for one in both}) != {200, 503}:
            assert time.monotonic() < deadline, answers
            time.sleep(0.1)
        [leader] = [one for one in both if ask(one, "/pd/api/v1/gc/safepoint")[0] == 200]
        [follower] = [one for one in both if one is not leader]
        for method, path in (
            ("GET", "/pd/api/v1/gc/safepoint"),
            ("DELETE", "/pd/api/v1/gc/safepoint/br"),
            ("GET", "/tidemark/api/v1/gc/explain"),
        ):
            status, error = ask(follower, path, method)
            assert (status, error["error_code"]) == (503, "TM:ErrNotLeader")
            assert leader.endpoints["coordinator"] in error["error_msg"]
        # the command line goes to the leader by itself
        flags = ["cli", "--pd", follower.endpoints["coordinator"], "--json", "gc", "explain"]
        done = subprocess.run(
            [*COMMAND, *flags], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["min_safe_point_id"] == "gc_worker"


def test_with_mtls_nothing_is_deleted_without_a_certificate(started, tmp_path):
    certificates = Certificates(tmp_path)
    security = certificates.security(ca=True)
    tls = [
        "--ca-path",
        security.ca_path,
        "--cert-path",
        security.cert_path,
        "--key-path",
        security.key_path,
    ]
    coordinator = started("a", "--metadata", f"leveldb:{tmp_path / 'metadata'}", *tls)
    path = "/pd/api/v1/gc/safepoint/br"
    assert ask(coordinator, path, "DELETE")[0] == 403
    assert ask(coordinator, path, "DELETE", certificates.client(certificate=False))[0] == 403
    assert ask(coordinator, path, "DELETE", certificates.client(certificate=True))[0] == 200
    with urllib.request.urlopen(
        f"http://{coordinator.endpoints['http']}/healthz", timeout=60
    ) as answer:
        assert answer.read() == b"ok\n"
    flags = ["cli", "--pd", coordinator.endpoints["coordinator"], *tls, "--json", "gc", "explain"]
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["blocked"]
