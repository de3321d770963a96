"""`tidemark cli doctor`: one page about what is slow or stuck, with remedies.

It asks captures and coordinators, and changes nothing. What does not answer is a finding, too. The
exit status is 1 if something needs somebody to act.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Final, TypeVar

import grpc.aio
from tidemarkpb.v1 import changefeed_pb2, dump_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.changefeed.diagnosis import (
    Finding,
    Level,
    diagnose_captures,
    diagnose_changefeed,
    diagnose_gc,
    diagnose_members,
    stages,
    worst_first,
)
from server.changefeed.view import detail
from server.cli import cluster
from server.cli.gc_blockers import explained
from server.cli.output import Output, plain
from server.cli.remote import CALL_S, Remote
from server.exit_status import EXIT_ERROR, EXIT_OK
from storage.model.errors import TidemarkError
from storage.model.ts import physical_ms

_BLOCKERS: Final = 10
_MARKS: Final = {Level.NOTE: "  note    ", Level.WARNING: "! warning ", Level.PROBLEM: "x PROBLEM "}

T = TypeVar("T")


def add_commands(groups: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command, which has no verbs."""
    doctor = groups.add_parser("doctor", parents=[shared])
    doctor.add_argument(
        "-c", "--changefeed-id", default="", help="look at this changefeed only (default: all)"
    )
    doctor.set_defaults(command=examine)


async def examine(remote: Remote, arguments: argparse.Namespace) -> Output:
    """Examine the whole cluster and show the findings, the worst first.

    Raises:
        CaptureUnavailableError, RemoteError: `-c` names a changefeed that cannot be asked about.
    """
    findings: list[Finding] = []
    only = arguments.changefeed_id
    # At the same time: what does not answer is waited for, for some seconds each.
    now_ms, of_cluster, changefeeds = await asyncio.gather(
        _now_ms(remote, findings), _cluster(remote, only), _changefeeds(remote, only)
    )
    findings += of_cluster
    shown = []
    for changefeed, dump in changefeeds:
        findings += diagnose_changefeed(changefeed, dump, now_ms)
        lags = {stage.name: round(stage.lag_s, 1) for stage in stages(changefeed, now_ms)}
        shown.append({"id": changefeed["id"], "state": changefeed["state"], "lag_seconds": lags})
    findings = worst_first(findings)
    document = {
        "healthy": not any(finding.level == Level.PROBLEM for finding in findings),
        "changefeeds": shown,
        "findings": [finding.document() for finding in findings],
    }
    status = EXIT_OK if document["healthy"] else EXIT_ERROR
    return Output(document, shown="\n".join(_page(shown, findings)), status=status)


async def _now_ms(remote: Remote, findings: list[Finding]) -> int:
    """Return the present by the coordinator's clock, or by ours where no coordinator answers."""

    async def tso() -> int:
        async with remote.coordinator() as pd:
            return physical_ms(await pd.tso())

    now_ms = await _asked(tso(), "coordinator", findings)
    return now_ms or int(time.time() * 1000)


async def _cluster(remote: Remote, only: str) -> list[Finding]:
    """The findings that are not of one changefeed: coordinators, captures, and GC; none where
    `only` names the changefeed that is looked at.
    """
    findings: list[Finding] = []
    if only:
        return findings
    nothing = argparse.Namespace(id="", path="health", listed="", columns=())
    health, captures, explanation = await asyncio.gather(
        _asked(cluster.show(remote, nothing), "coordinator", []),
        _asked(cluster.list_captures(remote, nothing), "captures", findings),
        _asked(explained(remote, [], _BLOCKERS), "garbage collection", []),
    )
    if health is not None:
        findings += diagnose_members(health.document)
    if captures is not None:
        findings += diagnose_captures(captures.document)
    if explanation is not None:
        findings += diagnose_gc(explanation)
    return findings


async def _changefeeds(
    remote: Remote, only: str
) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The changefeeds that are to be looked at, each with its dump, if it has one."""

    async def asked() -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        async with remote.capture() as channel:
            changefeed = ChangefeedServiceStub(channel)
            request = changefeed_pb2.ListChangefeedsRequest()
            ids = [only]
            if not only:
                listed = await changefeed.ListChangefeeds(request, timeout=CALL_S)
                ids = [each.id for each in listed.changefeeds]
            queries = [changefeed_pb2.QueryChangefeedRequest(id=each) for each in ids]
            answers = [await changefeed.QueryChangefeed(each, timeout=CALL_S) for each in queries]
            return [
                (detail(each.changefeed), await _dump(channel, each.changefeed.id))
                for each in answers
            ]

    if only:
        return await asked()
    # That no capture answers is a finding already.
    return await _asked(asked(), "captures", []) or []


async def _dump(channel: grpc.aio.Channel, changefeed: str) -> dict[str, Any] | None:
    request = dump_pb2.GetDumpStatusRequest(changefeed_id=changefeed)
    try:
        answer = await DumpServiceStub(channel).GetDumpStatus(request, timeout=CALL_S)
    except grpc.aio.AioRpcError as err:
        if err.code() == grpc.StatusCode.NOT_FOUND:
            return None
        raise
    return plain(answer.dump) | {"status": [plain(each) for each in answer.status]}


async def _asked(answer: Awaitable[T], where: str, findings: list[Finding]) -> T | None:
    """The answer, or None where there is none, which becomes a finding."""
    try:
        return await answer
    except TidemarkError as err:
        said = err.message if err.message.startswith("[TM:") else f"[TM:{err.code}] {err.message}"
        findings.append(Finding(Level.PROBLEM, where, said))
        return None


def _page(changefeeds: list[dict[str, Any]], findings: list[Finding]) -> Iterator[str]:
    """The text that people read: how far each changefeed is, then the findings."""
    for changefeed in changefeeds:
        lags = ", ".join(f"{name} {lag} s" for name, lag in changefeed["lag_seconds"].items())
        yield f"changefeed {changefeed['id']}: {changefeed['state']}; behind the present: {lags}"
    if changefeeds:
        yield ""
    for finding in findings:
        yield f"{_MARKS[finding.level]}{finding.where}: {finding.what}"
        if finding.do:
            yield f"{'':<10}→ {finding.do}"
    if all(finding.level == Level.NOTE for finding in findings):
        yield "nothing is wrong" if changefeeds else "nothing is wrong; there are no changefeeds"
