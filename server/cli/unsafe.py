"""`tidemark cli unsafe`: `resolve-lock` ends a transaction that holds changefeeds or GC back, alive or not."""

import argparse
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from gcsafepoint.explain.document import time_of
from server.cli import metadata
from server.cli.confirm import add_yes, confirm
from server.cli.number import timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from storage.model.errors import NotFoundError


class LockUnknownError(NotFoundError):
    """The key is not locked by that transaction."""

    code = "ErrLockUnknown"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `unsafe`."""
    group = groups.add_parser("unsafe", help="what can take somebody's work away")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("resolve-lock", help="end the transaction that holds a lock", parents=[shared])
    verb.add_argument("--key", type=hexadecimal, required=True, help="the locked key, raw, in hexadecimal")
    verb.add_argument("--start-ts", type=timestamp, required=True, metavar="TSO", help="the transaction")
    verb.add_argument("--dry-run", action="store_true", help="only show the lock")
    add_yes(verb)
    verb.set_defaults(command=resolve_lock)
    metadata.add_command(verbs, shared)


def hexadecimal(text: str) -> bytes:
    """Bytes of a hexadecimal text; raises ArgumentTypeError."""
    try:
        return bytes.fromhex(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal") from err


async def resolve_lock(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Decide at the primary, then commit or roll back this key; the other keys are resolved by whoever meets them."""
    async with remote.coordinator() as pd, KvClient.open(pd, remote.security) as kv:
        lock = await _lock(kv, arguments.key, arguments.start_ts)
        shown = {
            "key": lock.key.hex(),
            "primary": lock.primary_lock.hex(),
            "start_ts": lock.lock_version,
            "start_time": time_of(lock.lock_version),
            "ttl_ms": lock.lock_ttl,
            "kind": kvrpcpb.Op.Name(lock.lock_type).lower(),
        }
        if arguments.dry_run:
            return Output({"dry_run": True} | shown)
        if not arguments.yes:
            confirm(f"Roll transaction {lock.lock_version} of {shown['start_time']} back, unless it has committed?")
        resolver = LockResolver(pd, kv)
        commit_ts = await resolver.decide(lock)
        if lock.lock_type == kvrpcpb.PessimisticLock:
            await resolver.rollback_pessimistic(lock)
        else:
            await kv.resolve_lock([lock.key], lock.lock_version, commit_ts)
    return Output({"outcome": "committed" if commit_ts else "rolled back", "commit_ts": commit_ts} | shown)


async def _lock(kv: KvClient, key: bytes, start_ts: int) -> kvrpcpb.LockInfo:
    page = await kv.scan_lock(key, key + b"\0", start_ts, 1)
    for lock in page.locks:
        if lock.key == key and lock.lock_version == start_ts:
            return lock
    raise LockUnknownError(
        f"key {key.hex()} is not locked by transaction {start_ts}: it has ended, or the key is wrong"
    )
