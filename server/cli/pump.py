"""`tidemark cli pump …`: the verbs of binlogctl,
for pumps and for the drainers that read from them.
"""

import argparse
import json
from typing import Any

import grpc.aio
from tidemarkpb.v1 import pump_pb2 as pb
from tidemarkpb.v1.pump_pb2_grpc import PumpServiceStub

from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, RemoteError
from server.pump.registry import read_entry
from server.rpc.client import connect
from storage.meta.meta import KeyValue, Meta
from storage.model.errors import CorruptError, NotFoundError

_PREFIX = b"/tidb-binlog/v1/"
_STATES = ("online", "pausing", "paused", "closing", "offline")
_COLUMNS = (
    ("NODE", "nodeId"),
    ("HOST", "host"),
    ("STATE", "state"),
    ("MAX COMMIT TS", "maxCommitTS"),
)


class NodeUnknownError(NotFoundError):
    """No pump or drainer of that name is registered."""

    code = "ErrPumpUnknown"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `pump`."""
    group = groups.add_parser("pump")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    for kind, alias in (("pumps", "list"), ("drainers", "")):
        listed = verbs.add_parser(
            alias or kind, aliases=[kind] * bool(alias), help=f"list all {kind}", parents=[shared]
        )
        listed.set_defaults(command=list_nodes, kind=kind)
    leaving = (
        (
            "pause",
            pb.ChangeStateRequest.PAUSE,
            "stop a pump for a while: it serves its binlogs again after its next start",
        ),
        (
            "offline",
            pb.ChangeStateRequest.CLOSE,
            "stop a pump for good, once readers have all its binlogs",
        ),
    )
    for verb, action, text in leaving:
        left = verbs.add_parser(verb, aliases=[f"{verb}-pump"], help=text, parents=[shared])
        left.add_argument("--node-id", required=True, help="the pump's name in `pump list`")
        left.set_defaults(command=change_state, action=action)
    for kind, noun, listing, verb in (
        ("pumps", "pump", "list", "update"),
        ("drainers", "drainer", "drainers", ""),
    ):
        long = f"update-{noun}"
        updated = verbs.add_parser(
            verb or long,
            aliases=[long] * bool(verb),
            help=f"only write a dead {noun}'s state into the registry",
            parents=[shared],
        )
        updated.add_argument(
            "--node-id", required=True, help=f"the {noun}'s name in `pump {listing}`"
        )
        updated.add_argument(
            "--state",
            required=True,
            choices=_STATES,
            help="the state to register, which TiDB and other pumps will see",
        )
        updated.set_defaults(command=update, kind=kind)


async def list_nodes(remote: Remote, arguments: argparse.Namespace) -> Output:
    """All registered pumps, or drainers; of an entry that cannot be read, the name."""
    prefix = _PREFIX + arguments.kind.encode() + b"/"
    async with remote.metadata() as meta:
        pairs = await meta.get_prefix(prefix)
    return Output([_shown(pair, prefix) for pair in pairs], _COLUMNS)


async def change_state(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Ask a living pump to leave."""
    async with remote.metadata() as meta:
        entry = await _entry(meta, "pumps", arguments.node_id)
    try:
        async with connect(entry["host"], remote.security) as channel:
            request = pb.ChangeStateRequest(node_id=arguments.node_id, action=arguments.action)
            answer = await PumpServiceStub(channel).ChangeState(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as err:
        raise RemoteError(
            f"the pump at {entry['host']} did not do it: {err.details() or err.code().name}"
        ) from err
    return Output({"nodeId": arguments.node_id, "state": answer.state})


async def update(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Change the registry entry; a living pump or reader writes its own state over it."""
    async with remote.metadata() as meta:
        entry = await _entry(meta, arguments.kind, arguments.node_id) | {"state": arguments.state}
        await meta.put(
            _key(arguments.kind, arguments.node_id),
            json.dumps(entry, separators=(",", ":")).encode(),
        )
    return Output(entry)


async def _entry(meta: Meta, kind: str, node_id: str) -> dict[str, Any]:
    pair = await meta.get(_key(kind, node_id))
    if pair is None:
        raise NodeUnknownError(
            f"{node_id} is none of the registered ones; see `tidemark cli pump {kind}`"
        )
    return _parsed(pair)


def _shown(pair: KeyValue, prefix: bytes) -> dict[str, Any]:
    try:
        return _parsed(pair)
    except CorruptError:
        name = pair.key.removeprefix(prefix).decode(errors="replace")
        return {"nodeId": name, "host": "", "state": "unreadable"}


def _parsed(pair: KeyValue) -> dict[str, Any]:
    entry = read_entry(pair.value)
    if entry is None or "host" not in entry:
        raise CorruptError(
            f"{pair.key!r} holds {pair.value!r}, which is no registry entry; correct it with "
            "etcdctl"
        )
    return entry


def _key(kind: str, node_id: str) -> bytes:
    return _PREFIX + kind.encode() + b"/" + node_id.encode()
