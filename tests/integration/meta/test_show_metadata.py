"""`tidemark cli unsafe show-metadata` against every server of the etcd API."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from server.exit_status import EXIT_ERROR, EXIT_USAGE
from storage.meta import etcd3
from tests.integration.meta.test_etcd3 import certificates, place

FLAGS = {"ca_path": "--ca-path", "cert_path": "--cert-path", "key_path": "--key-path"}


@pytest.fixture
def records(etcd_api: Any) -> Iterator[str]:
    """A prefix with more keys than a page holds, and one record of an old version that has a
    password.
    """
    prefix = f"/tidemark/{uuid.uuid4()}/"
    with etcd3.client(*place(etcd_api), tls=etcd3.TlsFiles(**certificates(etcd_api))) as client:
        for number in range(501):
            client.put(f"{prefix}{number:04}", json.dumps({"checkpoint_ts": number}))
        client.put(f"{prefix}old", json.dumps({"sink_uri": "mysql://writer:hunter2@db:3306/shop"}))
        client.put(f"{prefix}\xff", b"\xff\x00")
        yield prefix
        client.delete_prefix(prefix)


def cli(api: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    tls = [part for name, path in certificates(api).items() if path for part in (FLAGS[name], path)]
    command = [
        sys.executable,
        "-m",
        "server.cli.main",
        "cli",
        "--pd",
        ",".join(api.addresses),
        *tls,
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_all_records_are_shown_and_none_of_their_secrets(etcd_api: Any, records: str) -> None:
    done = cli(etcd_api, "--json", "unsafe", "show-metadata", "--prefix", records)
    assert done.returncode == 0, done.stderr
    shown = {
        record["key"].removeprefix(records): record["value"] for record in json.loads(done.stdout)
    }
    assert len(shown) == 503
    assert shown["0500"] == {"checkpoint_ts": 500}
    assert shown["\xff"] == "ff00"
    assert "hunter2" not in done.stdout
    assert "db:3306" in shown["old"]["sink_uri"]


def test_a_prefix_without_records_is_an_empty_list(etcd_api: Any) -> None:
    done = cli(etcd_api, "--json", "unsafe", "show-metadata", "--prefix", f"/{uuid.uuid4()}/")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("address", "status"),
    [("127.0.0.1:1", EXIT_ERROR), ("nonsense", EXIT_USAGE), (":2379", EXIT_USAGE)],
)
def test_where_nobody_answers_the_address_is_named(address: str, status: int) -> None:
    command = [
        sys.executable,
        "-m",
        "server.cli.main",
        "cli",
        "--pd",
        address,
        "unsafe",
        "show-metadata",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert address in done.stderr
    assert "Traceback" not in done.stderr
