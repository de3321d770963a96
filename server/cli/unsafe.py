"""`tidemark cli unsafe`: operations that bypass the daemons.

`resolve-lock` ends a transaction that holds changefeeds or GC back, alive or not. `show-metadata`
shows Tidemark's records in etcd or PD, key by key, as `cdc cli` does; it only reads.
"""

import argparse
import asyncio
from collections.abc import Iterator
from typing import Any, Final

from kvproto import kvrpcpb_pb2 as kvrpcpb

from gcsafepoint.explain.explanation import time_of
from server.changefeed.view import record_document, record_text
from server.cli.arguments import add_yes, confirm, timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.config import MAX_MESSAGE_BYTES
from server.rpc.credentials import SecurityConfig
from server.rpc.enum_name import enum_name
from server.rpc.lock_resolver import LockResolver
from server.rpc.members import addresses_of
from server.rpc.tikv import KvClient
from storage.codec import prefix_end
from storage.meta import etcd3
from storage.meta.errors import MetaUnavailableError
from storage.model.errors import NotFoundError


class LockUnknownError(NotFoundError):
    """The key is not locked by that transaction."""

    code = "ErrLockUnknown"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `unsafe`."""
    group = groups.add_parser("unsafe")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser(
        "resolve-lock", help="end the transaction that holds a lock", parents=[shared]
    )
    verb.add_argument(
        "--key", type=hexadecimal, required=True, help="the locked key, raw, in hexadecimal"
    )
    verb.add_argument(
        "--start-ts",
        type=timestamp,
        required=True,
        metavar="TSO",
        help="start timestamp of the transaction",
    )
    verb.add_argument("--dry-run", action="store_true", help="change nothing; show the lock")
    add_yes(verb)
    verb.set_defaults(command=resolve_lock)
    _add_show_metadata(verbs, shared)


def hexadecimal(text: str) -> bytes:
    """Bytes of a hexadecimal text; raises ArgumentTypeError."""
    try:
        return bytes.fromhex(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal") from err


async def resolve_lock(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Decide at the primary, then commit or roll back this key;
    the other keys are resolved by whoever meets them.
    """
    async with remote.coordinator() as pd, KvClient.open(pd, remote.security) as kv:
        lock = await _lock(kv, arguments.key, arguments.start_ts)
        shown = {
            "key": lock.key.hex(),
            "primary": lock.primary_lock.hex(),
            "start_ts": lock.lock_version,
            "start_time": time_of(lock.lock_version),
            "ttl_ms": lock.lock_ttl,
            "kind": enum_name(kvrpcpb.Op, lock.lock_type).lower(),
        }
        if arguments.dry_run:
            return Output({"dry_run": True} | shown)
        if not arguments.yes:
            confirm(
                f"Roll transaction {lock.lock_version} of {shown['start_time']} back, unless it "
                "has committed?"
            )
        resolver = LockResolver(pd, kv)
        # At the primary, whatever the TTL says: that is what makes this unsafe, and the user was
        # asked.
        commit_ts = await resolver.decide(lock)
        if lock.lock_type == kvrpcpb.PessimisticLock:
            await resolver.rollback_pessimistic(lock)
        else:
            await kv.resolve_lock([lock.key], lock.lock_version, commit_ts)
    return Output(
        {"outcome": "committed" if commit_ts else "rolled back", "commit_ts": commit_ts} | shown
    )


async def _lock(kv: KvClient, key: bytes, start_ts: int) -> kvrpcpb.LockInfo:
    page = await kv.scan_lock(key, key + b"\0", start_ts, 1)
    for lock in page.locks:
        if lock.key == key and lock.lock_version == start_ts:
            return lock
    raise LockUnknownError(
        f"key {key.hex()} is not locked by transaction {start_ts}: it has ended, or the key is "
        "wrong"
    )


_COLUMNS: Final = (("KEY", "key"), ("REVISION", "mod_revision"), ("VALUE", "value"))
_PAGE: Final = 500


def _add_show_metadata(verbs: Any, shared: argparse.ArgumentParser) -> None:
    verb = verbs.add_parser(
        "show-metadata",
        help="show Tidemark's records in etcd or PD, without changing them",
        parents=[shared],
    )
    verb.add_argument(
        "--prefix", default="/tidemark/", help="what the keys begin with (default: %(default)s)"
    )
    verb.set_defaults(command=show_metadata)


async def show_metadata(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All keys below a prefix; where a URI may hold a secret, it is masked.

    Raises:
        NoAddressError: none is named.
        MetaUnavailableError: none answers.
    """
    coordinators = await remote.coordinators()
    async with remote.reaching(coordinators):
        for address in addresses_of(coordinators):
            try:
                return Output(
                    await asyncio.to_thread(_records, address, remote.security, arguments.prefix),
                    _COLUMNS,
                )
            except etcd3.failures() as err:
                last = err
        raise MetaUnavailableError(
            f"no metadata server answers at {coordinators}: {last or type(last).__name__}"
        )


def _records(address: str, security: SecurityConfig, prefix: str) -> list[dict[str, Any]]:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    tls = etcd3.TlsFiles(security.ca_path, security.cert_path, security.key_path)
    with etcd3.client(host, int(port), tls=tls, max_message_bytes=MAX_MESSAGE_BYTES) as client:
        return [
            {
                "key": record_text(pair.key),
                "mod_revision": pair.mod_revision,
                "value": record_document(value),
            }
            for value, pair in _pairs(client, prefix.encode())
        ]


def _pairs(client: Any, prefix: bytes) -> Iterator[tuple[bytes, Any]]:
    """All pairs, in pages: together they may be more than one message holds."""
    start, end = prefix or b"\0", prefix_end(prefix) or b"\0"
    while page := list(client.get_range(start, end, limit=_PAGE)):
        yield from page
        start = page[-1][1].key + b"\0"
