"""The etcd3 library, through our stubs, finds what it knows at every server of the etcd API."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.meta import etcd3

ROOT = Path(__file__).parents[3]


@pytest.fixture
def client(etcd_api: Any) -> Iterator[Any]:
    opened = etcd3.client(*place(etcd_api), tls=etcd3.TlsFiles(**certificates(etcd_api)))
    yield opened
    opened.close()


def place(api: Any) -> tuple[str, int]:
    host, _, port = api.addresses[0].rpartition(":")
    return host, int(port)


def certificates(api: Any) -> dict[str, str]:
    return {name: getattr(api.security, name) for name in ("ca_path", "cert_path", "key_path")}


@pytest.fixture
def prefix() -> str:
    return f"/etcd3/{uuid.uuid4()}/"


def test_status_and_members(client: Any) -> None:
    assert client.status().version.startswith("3.")
    assert [member.client_urls for member in client.members]


def test_put_get_and_delete(client: Any, prefix: str) -> None:
    client.put(prefix + "a", "1")
    client.put(prefix + "b", "2")
    value, pair = client.get(prefix + "a")
    assert (value, pair.key, pair.version) == (b"1", f"{prefix}a".encode(), 1)
    assert [
        value for value, _ in client.get_prefix(prefix, sort_order="descend", sort_target="key")
    ] == [b"2", b"1"]
    assert client.put_if_not_exists(prefix + "a", "x") is False
    assert client.replace(prefix + "a", "1", "3") is True
    assert client.delete(prefix + "b") is True
    assert client.get(prefix + "b") == (None, None)


def test_transactions(client: Any, prefix: str) -> None:
    tests, ops = client.transactions, client.transactions
    client.put(prefix + "a", "1")
    succeeded, (pairs,) = client.transaction(
        compare=[tests.value(prefix + "a") == "1", tests.version(prefix + "b") == 0],
        success=[ops.get(prefix + "a")],
        failure=[ops.delete(prefix + "a")],
    )
    assert succeeded
    assert pairs[0][0] == b"1"


def test_leases(client: Any, prefix: str) -> None:
    lease = client.lease(30)
    client.put(prefix + "a", "1", lease=lease)
    assert lease.granted_ttl == 30
    assert list(lease.keys) == [f"{prefix}a".encode()]
    assert [answer.TTL for answer in lease.refresh()] == [30]
    lease.revoke()
    assert client.get(prefix + "a") == (None, None)


WATCH = """
import json, os, sys, threading
from storage.meta import etcd3
host, port, prefix, certificates = json.loads(sys.argv[1])
client = etcd3.client(host, port, tls=etcd3.TlsFiles(**certificates))
events, cancel = client.watch_prefix(prefix)
threading.Timer(0.1, client.put, (prefix + "a", "1")).start()
event = next(iter(events))
print(event.key.decode().removeprefix(prefix), event.value.decode(), flush=True)
os._exit(0)
"""


def test_a_watch_sees_a_put(etcd_api: Any, prefix: str) -> None:
    """In a process of its own: the library's watch thread dies with an exception when its client is
    closed.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WATCH,
            json.dumps([*place(etcd_api), prefix, certificates(etcd_api)]),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "a 1\n"


def test_maintenance(client: Any) -> None:
    assert list(client.list_alarms()) == []
    assert isinstance(client.hash(), int)
    client.defragment()
