"""`tidemark cli unsafe`: operations that bypass the daemons, as `cdc cli unsafe` has them.

`resolve-lock` ends a transaction that holds changefeeds or GC back, alive or not, or those of a
region whose clients are gone. `show-metadata` shows Tidemark's records in etcd or PD, key by key;
it only reads. `delete-service-gc-safepoint` lets GC go on where changefeeds are gone, and `reset`
removes all changefeeds, while no capture runs.
"""

import argparse
import asyncio
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvproto import kvrpcpb_pb2 as kvrpcpb

from gcsafepoint.explain.explanation import time_of
from gcsafepoint.explain.names import CREATING_PREFIX, feed_of, generation_of
from server.capture.fence import Fence
from server.capture.records import RELEASED_S, Records
from server.capture.safepoint import ChangefeedSafePoints
from server.changefeed import keys
from server.changefeed.captures import living_captures
from server.changefeed.view import record_document, record_text
from server.cli.arguments import DEFAULT_NAMESPACE, add_yes, confirm, count, timestamp
from server.cli.output import Output
from server.cli.remote import Remote
from server.rpc.config import MAX_MESSAGE_BYTES
from server.rpc.credentials import SecurityConfig
from server.rpc.enum_name import enum_name
from server.rpc.lock_resolver import LockResolver, region_locks
from server.rpc.members import addresses_of
from server.rpc.tikv import KvClient
from storage.codec import prefix_end
from storage.meta import etcd3
from storage.meta.errors import MetaUnavailableError
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import ConflictError, InvalidError, NotFoundError
from storage.model.ts import compose


class OptionError(InvalidError):
    """Arguments do not go together."""

    code = "ErrAPIInvalidParam"


class CapturesRunningError(ConflictError):
    """The metadata is in use."""

    code = "ErrCapturesRunning"


class LockUnknownError(NotFoundError):
    """The key is not locked by that transaction."""

    code = "ErrLockUnknown"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `unsafe`."""
    group = groups.add_parser("unsafe")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser(
        "resolve-lock",
        help="end the transaction that holds a lock",
        parents=[shared],
        conflict_handler="resolve",  # --key is a lock's here, elsewhere also --key-path
    )
    where = verb.add_mutually_exclusive_group(required=True)
    where.add_argument("--key", type=hexadecimal, help="the locked key, raw, in hexadecimal")
    where.add_argument(
        "--region",
        type=count,
        metavar="ID",
        help="resolve all locks of a region whose clients are gone",
    )
    verb.add_argument(
        "--start-ts",
        type=timestamp,
        metavar="TSO",
        help="start timestamp of the transaction that has locked --key",
    )
    verb.add_argument(
        "--ts",
        type=timestamp,
        metavar="TSO",
        help="of --region: only locks of transactions that began up to here (default: a minute ago)",
    )
    _add_changing(verb, resolve_lock, "change nothing; show the locks")
    _add_show_metadata(verbs, shared)
    verb = verbs.add_parser(
        "delete-service-gc-safepoint",
        help="delete the GC safepoints of changefeeds that do not exist any more",
        parents=[shared],
    )
    _add_changing(verb, delete_safepoints, "change nothing; show the safepoints")
    verb = verbs.add_parser(
        "reset",
        help="remove all changefeeds with everything that is recorded of them; stop all captures first",
        parents=[shared],
    )
    verb.add_argument(
        "--cluster-id",
        choices=(DEFAULT_NAMESPACE,),
        help="accepted because `cdc cli` has it; there is only `default`",
    )
    _add_changing(verb, reset, "change nothing; show what would be removed")


def _add_changing(verb: argparse.ArgumentParser, command: Any, text: str) -> None:
    """Add what the commands share that change something."""
    verb.add_argument("--dry-run", action="store_true", help=text)
    add_yes(verb)
    verb.set_defaults(command=command)


def hexadecimal(text: str) -> bytes:
    """Bytes of a hexadecimal text; raises ArgumentTypeError."""
    try:
        return bytes.fromhex(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal") from err


async def resolve_lock(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Resolve one lock, or those of a region."""
    if arguments.region is not None:
        if arguments.start_ts is not None:
            raise OptionError("--start-ts is of the lock of a --key; a --region takes --ts")
        return await _resolve_region(remote, arguments)
    if arguments.start_ts is None or arguments.ts is not None:
        raise OptionError("--key needs --start-ts, which `gc explain` shows, and takes no --ts")
    return await _resolve_key(remote, arguments)


async def _resolve_region(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Resolve the locks of a region; transactions whose clients live go on."""
    async with remote.coordinator() as pd, KvClient.open(pd, remote.security) as kv:
        ts = arguments.ts or max(0, await pd.tso() - compose(_LIVING_MS, 0))
        pages = [page async for page in region_locks(pd, kv, arguments.region, ts)]
        locks = sum(map(len, pages))
        shown = {"region_id": arguments.region, "ts": ts, "time": time_of(ts), "locks": locks}
        if arguments.dry_run:
            return Output({"dry_run": True} | shown)
        if locks and not arguments.yes:
            confirm(
                f"Roll back, or commit, the transactions of {locks} locks in region "
                f"{arguments.region} that began up to {shown['time']}, and whose clients are gone?"
            )
        resolver = LockResolver(pd, kv)
        for page in pages:
            await resolver.resolve(page, 0)
        left = [len(page) async for page in region_locks(pd, kv, arguments.region, ts)]
    return Output(shown | {"locks_left": sum(left)})


async def _resolve_key(remote: Remote, arguments: argparse.Namespace) -> Output:
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
_LIVING_MS: Final = 60_000
"""Younger transactions are taken for living ones, as `cdc cli` does."""


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


async def delete_safepoints(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Delete the safepoints of changefeeds that are gone; others hold history that they need."""
    async with remote.coordinator() as pd, remote.metadata() as meta:
        services = await Records(meta, Fence()).left_services(pd.cluster_id)
        if arguments.dry_run:
            return Output({"dry_run": True, "safepoints": services})
        if services and not arguments.yes:
            confirm(f"Delete the GC safepoints {', '.join(services)}, which no changefeed has?")
        await ChangefeedSafePoints(pd).delete_all(services)
    return Output({"deleted": services})


async def reset(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Remove all changefeeds, and what is recorded of captures.

    Raises:
        CapturesRunningError: a capture runs, and would go on with what is removed.
    """
    async with remote.coordinator() as pd, remote.metadata() as meta:
        records = Records(meta, Fence())
        changefeeds = await records.ids()
        services = [each for each in await records.service_ids(pd.cluster_id) if feed_of(each)]
        shown = {"changefeeds": changefeeds, "safepoints": services}
        if arguments.dry_run:
            return Output({"dry_run": True} | shown)
        await _check_no_capture(meta)
        if not arguments.yes:
            names = ", ".join(changefeeds) or "none is there"
            confirm(
                f"Remove all changefeeds ({names}), their checkpoints and their GC safepoints at "
                f"{await remote.coordinators()}? Targets stay as they are."
            )
        await _remove_all(meta, services)
        # Afterwards: a changefeed whose record was left would lose its history.
        await ChangefeedSafePoints(pd).delete_all(services)
    return Output({"removed": True} | shown)


async def _remove_all(meta: Meta, services: Iterable[str]) -> None:
    """Delete all records; a changefeed that gets one of the ids again has another service than the
    one whose deletion may arrive late.
    """
    lease = await meta.grant_lease(RELEASED_S)
    own = [each for each in services if not each.startswith(CREATING_PREFIX)]
    generations = {feed_of(each): generation_of(each) for each in sorted(own, key=generation_of)}
    await meta.write_all(
        [
            Put(keys.released(changefeed), b"%d" % generation, lease.id)
            for changefeed, generation in generations.items()
        ]
    )
    deleted = [Delete(prefix, prefix_end(prefix)) for prefix in keys.OF_CHANGEFEEDS]
    if not (await meta.txn([Compare.absent(keys.OWNER)], deleted)).succeeded:
        raise CapturesRunningError("a capture has started just now; stop it, and try again")


async def _check_no_capture(meta: Meta) -> None:
    captures = await living_captures(meta)
    names = [*(record.id for record in captures.records), *captures.unreadable]
    if names or captures.owner:
        raise CapturesRunningError(
            f"captures run, and would go on with what is removed: {', '.join(names)}. Stop them; "
            "one that has died is forgotten after 10 s"
        )


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
