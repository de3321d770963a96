"""Members that die, servers that are killed, etcds that demand a user:
what client and pass-through make of it.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from server.rpc.credentials import SecurityConfig
from storage.meta import remote
from storage.meta.client import EtcdMeta, open_meta
from storage.meta.errors import (
    MetaAuthError,
    MetaUnavailableError,
    PermissionDeniedError,
    UserNeededError,
)
from storage.meta.meta import Compare, Get, Put
from tests.ports import free_ports

KEYS = b"/failover/"


@pytest.fixture
def trio(tmp_path: Path, certificates: SecurityConfig, servers: Any) -> Iterator[Any]:
    """Three etcd members with mTLS."""
    with servers.etcd_cluster(tmp_path, 3, security=certificates) as members:
        yield members


@pytest.fixture(params=["directly", "through a coordinator"])
def api(
    request: pytest.FixtureRequest, trio: Any, certificates: SecurityConfig, servers: Any
) -> Iterator[Any]:
    """The three members, or a coordinator before them."""
    etcd = servers.Api([member.address for member in trio], certificates)
    with ExitStack() as stack:
        if request.param == "directly":
            yield etcd
        else:
            process = stack.enter_context(servers.coordinator(etcd.url, security=certificates))
            yield servers.Api([process.address], certificates)


async def test_a_killed_member_costs_neither_writes_nor_events_nor_leases(
    api: Any, trio: Any
) -> None:
    async with (
        open_meta(api.url, api.channel) as meta,
        asyncio.TaskGroup() as tasks,
        await meta.grant_lease(60) as lease,
    ):
        first = await meta.put(KEYS, b"", lease.id)
        watching = tasks.create_task(seen(meta, first, 31))
        for number in range(30):
            if number == 10:
                trio[0].kill()
            if number == 20:
                trio[0].start()
            await written(meta, b"%d" % number)
        revisions = await watching
        assert len(revisions) == len(set(revisions)) == 31
        assert revisions == sorted(revisions)
        assert not lease.lost.is_set()


async def test_a_member_that_falls_silent_is_left_by_calls_leases_and_watches(
    trio: Any, certificates: SecurityConfig, servers: Any
) -> None:
    api = servers.Api([member.address for member in trio], certificates)
    async with (
        open_meta(api.url, api.channel) as meta,
        asyncio.TaskGroup() as tasks,
        await meta.grant_lease(12) as lease,
    ):
        first = await meta.put(KEYS, b"", lease.id)
        watching = tasks.create_task(seen(meta, first, 2))
        trio[0].signal(signal.SIGSTOP)
        stopped_s = asyncio.get_running_loop().time()
        try:
            while (
                not watching.done() or lease.deadline <= stopped_s + lease.ttl_s
            ):  # renewed by another one
                await meta.put(KEYS, b"again", lease.id)
            assert not lease.lost.is_set()
        finally:
            trio[0].signal(signal.SIGCONT)


async def test_what_was_not_sent_for_lack_of_a_connection_goes_to_the_next_endpoint(
    real_etcd: Any, servers: Any
) -> None:
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    api = servers.Api([*dead, *real_etcd.addresses], SecurityConfig())
    async with open_meta(api.url, api.channel) as meta:
        created = await meta.txn([Compare.absent(KEYS + b"new")], [Put(KEYS + b"new", b"")])
        assert created.succeeded


async def written(meta: EtcdMeta, value: bytes) -> None:
    """One conditional write, repeated as its caller must: read what holds, then decide."""
    while True:
        before = await meta.get(KEYS)
        assert before is not None
        if before.value == value:
            return
        try:
            await meta.txn(
                [Compare.unchanged(KEYS, before.mod_revision)],
                [Put(KEYS, value, before.lease)],
                [Get(KEYS)],
            )
        except MetaUnavailableError:
            continue


async def seen(meta: EtcdMeta, start: int, count: int) -> list[int]:
    revisions: list[int] = []
    async for events in meta.watch(KEYS, start):
        revisions += [event.pair.mod_revision for event in events]
        if len(revisions) >= count:
            return revisions
    raise AssertionError


async def test_a_killed_coordinator_has_all_it_answered_and_its_leases_and_watches_go_on(
    tmp_path: Path, servers: Any
) -> None:
    with servers.coordinator(f"leveldb:{tmp_path / 'metadata'}") as process:
        api, done = servers.Api([process.address], SecurityConfig()), asyncio.Event()
        async with (
            open_meta(api.url, api.channel) as meta,
            asyncio.TaskGroup() as tasks,
            await meta.grant_lease(60) as lease,
        ):
            first = await meta.put(KEYS, b"", lease.id)
            watching = tasks.create_task(seen(meta, first, 90))
            for writer in range(3):
                tasks.create_task(counted(meta, KEYS + b"%d" % writer, done))
            await seen(meta, first, 30)
            process.kill()
            process.start()
            assert len(set(await watching)) >= 90
            done.set()
            assert not lease.lost.is_set()
            pair = await meta.get(KEYS)
            assert pair is not None
            assert (pair.lease, pair.create_revision) == (lease.id, first)


async def counted(meta: EtcdMeta, key: bytes, done: asyncio.Event) -> None:
    """Writes 1, 2, 3…; none that was answered is ever missing."""
    number = 0
    while not done.is_set():
        number += 1
        await meta.put(key, b"%d" % number)
        pair = await meta.get(key)
        assert pair is not None
        assert int(pair.value) == number


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, servers: Any) -> Iterator[Any]:
    """An etcd that demands users, with one who may write under /ours/."""
    with servers.etcd_cluster(tmp_path_factory.mktemp("guarded"), 1) as (member,):
        api = servers.Api([member.address], SecurityConfig())
        for command in (
            "user add root:rootpw",
            "user grant-role root root",
            "role add ours",
            "role grant-permission ours --prefix=true readwrite /ours/",
            "user add tide:s3cret",
            "user grant-role tide ours",
            "auth enable",
        ):
            api.etcdctl(*command.split())
        yield api


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def become(name: str, password: str) -> None:
        (tmp_path / "password").write_text(password + "\n")
        monkeypatch.setenv(remote.USER_ENV, name)
        monkeypatch.setenv(remote.PASSWORD_FILE_ENV, str(tmp_path / "password"))

    return become


async def test_a_user_may_do_what_its_role_allows_and_a_lost_token_is_replaced(
    guarded: Any, as_user: Any
) -> None:
    as_user("tide", "s3cret")
    async with open_meta(guarded.url, guarded.channel) as meta:
        revision = await meta.put(b"/ours/a", b"1")
        async for events in meta.watch(b"/ours/", revision):
            assert events[0].pair.value == b"1"
            break
        with pytest.raises(PermissionDeniedError, match="grant-permission"):
            await meta.put(b"/theirs", b"1")
        guarded.etcdctl(
            "--user=root:rootpw", "role", "grant-permission", "ours", "readwrite", "/new"
        )
        await meta.put(b"/new", b"1")


async def test_without_a_user_or_with_a_wrong_password_the_error_says_what_to_do(
    guarded: Any, as_user: Any
) -> None:
    async with open_meta(guarded.url, guarded.channel) as meta:
        with pytest.raises(UserNeededError, match="password file"):
            await meta.put(b"/ours/a", b"1")
    as_user("tide", "wr0ng")
    async with open_meta(guarded.url, guarded.channel) as meta:
        with pytest.raises(MetaAuthError, match="password file") as refused:
            await meta.put(b"/ours/a", b"1")
        assert "wr0ng" not in str(refused.value)


async def test_a_coordinator_lends_its_user_to_those_who_come_without_one(
    guarded: Any, as_user: Any, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user("root", "rootpw")
    with servers.coordinator(guarded.url) as process:
        monkeypatch.delenv(remote.USER_ENV)
        api = servers.Api([process.address], SecurityConfig())
        async with open_meta(api.url, api.channel) as meta:
            revision = await meta.put(b"/theirs", b"1")
            guarded.etcdctl(
                "--user=root:rootpw", "role", "grant-permission", "ours", "read", "/changes/tokens"
            )
            assert await meta.get(b"/theirs") is not None
            async for events in meta.watch(b"/theirs", revision):
                assert events[0].pair.value == b"1"
                break
        as_user("tide", "s3cret")
        async with open_meta(api.url, api.channel) as meta:
            with pytest.raises(PermissionDeniedError):
                await meta.get(b"/theirs")


async def test_a_user_is_no_hindrance_where_none_is_demanded(real_etcd: Any, as_user: Any) -> None:
    as_user("tide", "s3cret")
    async with open_meta(real_etcd.url, real_etcd.channel) as meta:
        await meta.put(b"/ours/a", b"1")


def test_the_password_is_not_shown() -> None:
    assert "s3cret" not in repr(remote.User("tide", "s3cret"))


def test_a_name_without_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetaAuthError, match=remote.PASSWORD_FILE_ENV):
        remote.User.from_environment({remote.USER_ENV: "tide"})
    with pytest.raises(MetaAuthError, match="nowhere"):
        remote.User.from_environment(
            {remote.USER_ENV: "tide", remote.PASSWORD_FILE_ENV: str(tmp_path / "nowhere")}
        )
    assert remote.User.from_environment(
        {remote.USER_ENV: "tide", remote.PASSWORD_ENV: "p"}
    ) == remote.User("tide", "p")
    assert remote.User.from_environment({}) is None
