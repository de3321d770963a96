"""The Rust client from PyPI, which nobody here wrote, works unchanged."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import row_key, stubs_of

tikv_client = pytest.importorskip(
    "tikv_client", reason="its wheels are for Linux x86-64 and CPython 3.11 only"
)

STORE_FLAGS = (
    "--wait-for-lock-timeout",
    "0.1",
)  # this client asks ten times, each time for as long as the store likes
ACROSS_REGIONS = [
    row_key(100, 1),
    row_key(101, 1),
    row_key(101, 600),
    row_key(102, 1),
    row_key(200, 1),
]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The client's calls run on the thread's event loop."""
    with contextlib.closing(asyncio.new_event_loop()) as opened:
        asyncio.set_event_loop(opened)
        yield opened
        asyncio.set_event_loop(None)


@pytest.fixture(scope="module")
def client(cluster: Cluster, loop: asyncio.AbstractEventLoop) -> Any:
    return tikv_client.TransactionClient.connect([cluster.coordinator.addr])


def put(client: Any, rows: dict[bytes, bytes]) -> None:
    txn = client.begin()
    for key, value in rows.items():
        txn.put(key, value)
    txn.commit()


@contextlib.contextmanager
def begun(client: Any, *, pessimistic: bool = False) -> Iterator[Any]:
    """A transaction that is rolled back unless it ended before:
    the client aborts the process over a forgotten one.
    """
    txn = client.begin(pessimistic=pessimistic)
    try:
        yield txn
    finally:
        with contextlib.suppress(Exception):
            txn.rollback()


def read(client: Any, *keys: bytes) -> list[bytes | None]:
    with begun(client) as txn:
        return [txn.get(key) for key in keys]


def test_a_transaction_over_all_regions_commits_and_reads_back(client: Any) -> None:
    rows = {key: b"v" * (300 * at) for at, key in enumerate(ACROSS_REGIONS, 1)}
    put(client, rows)
    assert read(client, *rows, b"absent") == [*rows.values(), None]
    with begun(client) as txn:
        assert dict(txn.batch_get([*rows, b"absent"])) == rows
        scanned = txn.scan(b"t", b"u", 100)
        assert [(key, value) for key, value in scanned if key in rows] == list(rows.items())
        assert txn.scan(b"t", b"u", 2) == scanned[:2]


def test_old_snapshots_stay_readable(client: Any) -> None:
    put(client, {b"old": b"1"})
    with begun(client) as before:
        put(client, {b"old": b"2"})
        assert before.get(b"old") == b"1"
    assert read(client, b"old") == [b"2"]


def test_the_first_committer_wins(client: Any) -> None:
    with begun(client) as first, begun(client) as second:
        first.put(b"contended", b"1")
        second.put(b"contended", b"2")
        first.commit()
        with pytest.raises(Exception, match="WriteConflict"):
            second.commit()
    assert read(client, b"contended") == [b"1"]


def test_rollback_and_delete(client: Any) -> None:
    put(client, {b"kept": b"1", b"gone": b"1"})
    with begun(client) as txn:
        txn.put(b"kept", b"2")
    with begun(client) as txn:
        txn.delete(b"gone")
        txn.commit()
    assert read(client, b"kept", b"gone") == [b"1", None]


def test_insert_refuses_what_exists(client: Any) -> None:
    put(client, {b"there": b"1"})
    with begun(client) as txn:
        txn.insert(b"there", b"2")
        with pytest.raises(Exception, match="AlreadyExist"):
            txn.commit()


def test_pessimistic_transactions_lock_read_and_commit(client: Any) -> None:
    put(client, {row_key(101, 7): b"1", row_key(102, 7): b"1"})
    with begun(client, pessimistic=True) as txn:
        assert txn.get_for_update(row_key(101, 7)) == b"1"
        assert dict(txn.batch_get_for_update([row_key(102, 7)])) == {row_key(102, 7): b"1"}
        txn.put(row_key(101, 7), b"2")
        txn.delete(row_key(102, 7))
        txn.lock_keys([row_key(101, 8)])
        txn.commit()
    assert read(client, row_key(101, 7), row_key(102, 7)) == [b"2", None]


def test_a_pessimistic_lock_stops_a_second_one_until_it_is_given_back(client: Any) -> None:
    with begun(client, pessimistic=True) as first, begun(client, pessimistic=True) as second:
        first.put(b"mine", b"1")
        with pytest.raises(Exception, match=r"(?i)lock"):
            second.put(b"mine", b"2")
    with begun(client, pessimistic=True) as third:
        third.put(b"mine", b"3")
        third.commit()
    assert read(client, b"mine") == [b"3"]


def test_the_orphan_lock_of_a_killed_pessimistic_client_does_not_stop_readers(
    cluster: Cluster, client: Any
) -> None:
    put(client, {b"hostage": b"1"})
    program = (
        "import sys, time\nfrom tikv_client import TransactionClient\n"
        "txn = TransactionClient.connect([sys.argv[1]]).begin(pessimistic=True)\n"
        "txn.put(b'hostage', b'2')\nprint('locked', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, cluster.coordinator.addr], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    process.stdout.close()
    process.kill()
    process.wait()
    assert read(client, b"hostage") == [b"1"]


def test_expired_orphans_are_resolved_by_whoever_meets_them(
    cluster: Cluster, client: Any, loop: asyncio.AbstractEventLoop
) -> None:
    open_primary, done_primary = row_key(101, 20), row_key(101, 21)
    open_secondary, done_secondary = row_key(102, 20), row_key(102, 21)
    put(client, dict.fromkeys([open_primary, done_primary, open_secondary, done_secondary], b"old"))

    async def leave_orphans() -> None:
        async with stubs_of(cluster) as stubs:
            abandoned = await stubs.prewrite(open_primary, b"new", ttl_ms=1)
            await stubs.prewrite(
                open_secondary, b"new", primary=open_primary, start_ts=abandoned, ttl_ms=1
            )
            half = await stubs.prewrite(done_primary, b"new", ttl_ms=1)
            await stubs.prewrite(
                done_secondary, b"new", primary=done_primary, start_ts=half, ttl_ms=1
            )
            await stubs.commit(done_primary, half)

    loop.run_until_complete(leave_orphans())
    assert read(client, open_secondary, done_secondary) == [b"old", b"new"]
    with begun(client) as txn:
        assert dict(txn.scan(open_primary, row_key(101, 22), 10)) == {
            open_primary: b"old",
            done_primary: b"new",
        }


def total(client: Any, accounts: list[bytes]) -> int:
    """The client gives a lock up after 1.5 s, but after a failed commit it leaves locks that live
    for 3 s.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with begun(client) as txn:
            try:
                return sum(int(balance) for _, balance in txn.batch_get(accounts))
            except Exception as err:
                if "Failed to resolve lock" not in str(err):
                    raise
    pytest.fail("a lock outlived its TTL")


def test_concurrent_clients_keep_the_bank_whole(cluster: Cluster, client: Any) -> None:
    accounts = [row_key(table, handle) for table in (101, 102) for handle in (1000, 1001, 1002)]
    put(client, dict.fromkeys(accounts, b"100"))
    seen = 0
    with contextlib.ExitStack() as running:
        tellers = [
            running.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.integration.store.teller",
                        cluster.coordinator.addr,
                        mode,
                        str(seed),
                    ],
                    stdout=subprocess.PIPE,
                    env={"PYTHONPATH": ".:proto/gen"},
                )
            )
            for seed, mode in enumerate(["optimistic", "pessimistic", "optimistic"])
        ]
        while any(teller.poll() is None for teller in tellers):
            assert total(client, accounts) == 600
            seen += 1
        committed = [int(teller.communicate()[0]) for teller in tellers]
    assert all(teller.returncode == 0 for teller in tellers)
    assert sum(committed) > 20
    assert total(client, accounts) == 600
    assert seen > 0


def test_raw_keys(cluster: Cluster, loop: asyncio.AbstractEventLoop) -> None:
    raw = tikv_client.RawClient.connect([cluster.coordinator.addr])
    raw.batch_put({b"a": b"1", b"b": b"2", b"c": b"3"})
    raw.put(b"d", b"")
    raw.delete(b"b")
    assert raw.get(b"a") == b"1"
    assert raw.get(b"b") is None
    assert dict(raw.batch_get([b"a", b"b", b"c"])) == {b"a": b"1", b"c": b"3"}
    assert raw.scan(b"a", b"z", 10) == [(b"a", b"1"), (b"c", b"3"), (b"d", b"")]
    raw.delete_range(b"a", b"d")
    assert raw.scan(b"a", b"z", 10) == [(b"d", b"")]
