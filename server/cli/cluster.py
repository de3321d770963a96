"""`tidemark cli member|leader|health|store|region`: what pd-ctl shows, by the coordinator's HTTP
API, which PD has, too; and `capture list|drain|resign`, and `tso query|TS`.
"""

import argparse
import asyncio
import json
import time
import urllib.error
from typing import Any, Final
from urllib.parse import quote

import grpc
import grpc.aio
from tidemarkpb.v1 import capture_pb2 as pb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from gcsafepoint.explain.explanation import time_of
from server.cli.arguments import period, timestamp
from server.cli.output import Output
from server.cli.remote import CALL_S, Remote, RemoteError
from server.exit_status import EXIT_ERROR, EXIT_OK
from server.rpc.client import http_opener
from server.rpc.credentials import SecurityConfig
from server.rpc.members import addresses_of
from server.rpc.pd import PdUnavailableError
from storage.model.ts import logical, physical_ms

_API: Final = "/pd/api/v1/"
_CALL_S: Final = 10.0
_VERBS: Final = {
    "member": ("members", "members", (
        ("NAME", "name"), ("ID", "member_id"), ("ADDRESS", "client_urls"),
    )),
    "leader": ("leader", "", ()),
    "health": ("health", "", (
        ("NAME", "name"), ("ID", "member_id"), ("HEALTHY", "health"), ("ADDRESS", "client_urls"),
    )),
    "store": ("stores", "stores", (
        ("ID", "store.id"), ("ADDRESS", "store.address"), ("STATE", "store.state_name"),
        ("REGIONS", "status.region_count"), ("LEADERS", "status.leader_count"),
    )),
    "region": ("regions", "regions", (
        ("ID", "id"), ("LEADER STORE", "leader.store_id"), ("START", "start_key"),
        ("END", "end_key"),
    )),
}  # fmt: skip
"""Path, the member of the answer that lists them, and columns, by verb."""
_ONE: Final = {"store": "store/", "region": "region/id/"}
_CAPTURE_COLUMNS: Final = (
    ("ID", "id"),
    ("OWNER", "is-owner"),
    ("ADDRESS", "address"),
    ("FLIGHT", "flight-address"),
    ("DRAINING", "draining"),
    ("LOGS", "maintained"),
)
_DRAIN_LOOK_S: Final = 1.0
_QUERY = "query"


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the groups."""
    _add_capture(groups, shared)
    _add_tso(groups, shared)
    for name, (path, listed, columns) in _VERBS.items():
        verb = groups.add_parser(name, parents=[shared])
        verb.set_defaults(command=show, path=path, listed=listed, columns=columns, one="", id="")
        if name in _ONE:
            verb.add_argument("id", nargs="?", default="", metavar="ID", help="show only this one")
            verb.set_defaults(one=_ONE[name])


async def show(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show the coordinator's facts about the cluster.

    Raises:
        PdUnavailableError: none answers.
        RemoteError: it refused, and says why.
    """
    if arguments.id:
        return Output(await _get(remote, arguments.one + quote(arguments.id, safe="")))
    answer = await _get(remote, arguments.path)
    rows = answer[arguments.listed] if arguments.listed else answer
    if not isinstance(rows, list):
        return Output(rows)
    shown = Output([_joined(row) for row in rows], arguments.columns)
    return Output(answer, shown=shown.text())


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of addresses as one text."""
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in row.items()
    }


async def _get(remote: Remote, path: str) -> Any:
    said = ""
    coordinators = await remote.coordinators()
    async with remote.reaching(coordinators):
        for address in addresses_of(coordinators):
            try:
                return await asyncio.to_thread(_fetched, address, path, remote.security)
            except urllib.error.HTTPError as err:
                with err:
                    said = err.read().decode(errors="replace").strip()
                if err.code != 503:  # another one may know the leader
                    raise RemoteError(said or str(err)) from err
            except (OSError, ValueError) as err:
                said = str(err)
        raise PdUnavailableError(f"no coordinator answers at {coordinators}: {said}")


def _fetched(address: str, path: str, security: SecurityConfig) -> Any:
    host = address.rpartition("//")[2]
    scheme = "https" if security.enabled else "http"
    with http_opener(security).open(f"{scheme}://{host}{_API}{path}", timeout=_CALL_S) as answer:
        return json.load(answer)


def _add_capture(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `capture`."""
    group = groups.add_parser("capture")
    verbs = group.add_subparsers(required=True, metavar="VERB")
    listed = verbs.add_parser("list", help="list the live captures", parents=[shared])
    listed.set_defaults(command=list_captures)
    drain = verbs.add_parser(
        "drain",
        help=(
            "move a capture's tables to the other captures, before you stop it; exit status 1 "
            "while some are left"
        ),
        parents=[shared],
    )
    drain.add_argument("id", metavar="ID", help="id of the capture, as in `capture list`")
    drain.add_argument(
        "--wait",
        type=period,
        default=0,
        metavar="DURATION",
        help="wait until no table is left, for at most this long",
    )
    drain.add_argument(
        "--cancel", action="store_true", help="end the draining: the capture may have tables again"
    )
    drain.set_defaults(command=drain_capture)
    resign = verbs.add_parser(
        "resign", help="have the captures elect another owner", parents=[shared]
    )
    resign.set_defaults(command=resign_owner)


async def drain_capture(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Take all tables from a capture."""
    request = pb.DrainCaptureRequest(id=arguments.id, cancel=arguments.cancel)
    until_s = time.monotonic() + arguments.wait
    while True:
        tables = await _drained(remote, request)
        is_over = tables == 0 or arguments.cancel
        if is_over or time.monotonic() >= until_s:
            break
        await asyncio.sleep(_DRAIN_LOOK_S)
    left = "not known: an election is under way" if tables is None else tables
    shown = f"{arguments.id} takes part again" if arguments.cancel else f"tables left: {left}"
    document = {"id": arguments.id, "draining": not arguments.cancel, "tables": tables}
    return Output(document, shown=shown, status=EXIT_OK if is_over else EXIT_ERROR)


async def _drained(remote: Remote, request: pb.DrainCaptureRequest) -> int | None:
    """Return how many tables a capture still has; None: another owner is being elected."""
    async with remote.capture() as channel:
        try:
            answer = await CaptureServiceStub(channel).DrainCapture(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as err:
            if err.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return None
    return answer.tables


async def resign_owner(remote: Remote, _: argparse.Namespace) -> Output:
    """Let another capture be elected."""
    async with remote.capture() as channel:
        await CaptureServiceStub(channel).ResignOwner(pb.ResignOwnerRequest(), timeout=CALL_S)
    return Output({"resigned": True}, shown="the owner resigns; see `tidemark cli capture list`")


async def list_captures(remote: Remote, _: argparse.Namespace) -> Output:
    """All living captures."""
    async with remote.capture() as channel:
        answer = await CaptureServiceStub(channel).ListCaptures(
            pb.ListCapturesRequest(), timeout=CALL_S
        )
    rows = [
        {
            "id": capture.id,
            "is-owner": capture.is_owner,
            "address": capture.address,
            "flight-address": capture.flight_address,
            "cluster-id": "default",
            "version": capture.version,
            "draining": capture.draining,
            "maintained": capture.maintained,
        }
        for capture in answer.captures
    ]
    return Output(rows, _CAPTURE_COLUMNS)


def _add_tso(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the group `tso`."""
    verb = groups.add_parser("tso", parents=[shared])
    verb.add_argument(
        "ts",
        type=ts_or_query,
        metavar="query|TS",
        help="`query` gets a new timestamp; a number is decoded",
    )
    verb.set_defaults(command=show_tso)


def ts_or_query(text: str) -> int | str:
    """`query`, or a timestamp in decimal or 0x hexadecimal; raises ArgumentTypeError."""
    return text if text == _QUERY else timestamp(text)


async def show_tso(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Show a timestamp and its parts; only `query` calls the coordinator."""
    ts = arguments.ts
    if ts == _QUERY:
        async with remote.coordinator() as pd:
            ts = await pd.tso()
    return Output(
        {"tso": ts, "time": time_of(ts), "physical_ms": physical_ms(ts), "logical": logical(ts)}
    )
