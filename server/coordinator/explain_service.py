"""`gc explain` on the leading coordinator: gathers the situation, explains it,
and answers ExplainGC.

`Explainer.explain` is shared by gRPC (`ExplainService`) and HTTP (`server.coordinator.http_api`).
`gather` puts a `Situation` together: safe points from the term's memory, records from the metadata,
the rest from the captures, each of which is asked by itself and given `ANSWER_SECONDS` to answer. A
part that cannot be had is replaced by the reason, and a capture that does not answer is a finding;
only the safe points are indispensable. Only the leader answers, because only it knows them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.json_format import ParseDict
from tidemarkpb.v1 import capture_pb2, explain_pb2
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from gcsafepoint.explain.explanation import MOST_CHAINS, document, explain
from gcsafepoint.explain.situation import Capture, Feed, Lock, Region, Situation, Table, Worker
from gcsafepoint.state.states import GcView
from gcsafepoint.worker.records import LAST_RUN_TIME, LEADER_DESC, read_config
from server.changefeed import keys
from server.changefeed.captures import living_captures
from server.coordinator.leadership.members import Members
from server.coordinator.term import CurrentTerm
from server.gc_worker.view import MetaRecords
from storage.meta.meta import KeyValue, Meta
from storage.model.errors import InvalidError, TidemarkError, UnavailableError

_GATHER_SECONDS = 10.0
_CONCURRENT_EXPLANATIONS = 4
_NAMES_MAX, _NAME_CHARACTERS_MAX = 100, 1024


ANSWER_SECONDS = 2.5
ToCapture: TypeAlias = Callable[[str], grpc.aio.Channel]
"""Connects to the capture at an address."""
_CONCURRENT_CAPTURES = 16


class ExplainBusyError(UnavailableError):
    """There are too many explanations at once, or the metadata is too slow."""

    code = "ErrExplainUnavailable"


class ExplainRequestError(InvalidError):
    """The request exceeds a limit."""

    code = "ErrAPIInvalidParam"


@dataclass(slots=True)
class CaptureAnswers:
    """The answers of the captures: for each changefeed its capture and the progress of
    its tables.
    """

    captures: list[Capture] = field(default_factory=list)
    running: dict[str, tuple[str, tuple[Table, ...]]] = field(default_factory=dict)


class Explainer:
    """Explains from the term that leads at the time."""

    def __init__(
        self, meta: Meta, current: CurrentTerm, members: Members, to_capture: ToCapture
    ) -> None:
        self._meta = meta
        self._current = current
        self._members = members
        self._to_capture = to_capture
        self._slots = asyncio.Semaphore(_CONCURRENT_EXPLANATIONS)

    async def explain(self, what_if_remove: Sequence[str] = (), limit: int = 0) -> dict[str, Any]:
        """The explanation as `gcsafepoint.explain.explanation.document` writes it;
        a leader that lost its lease meanwhile does not answer.

        Raises:
            NotLeaderError: naming the leader.
            ExplainRequestError: too many names, or too long ones.
            BlockerUnknownError, BlockerFixedError: nothing of a name to be removed holds GC back.
            ExplainBusyError: it took too long.
        """
        if len(what_if_remove) > _NAMES_MAX or any(
            len(name) > _NAME_CHARACTERS_MAX for name in what_if_remove
        ):
            raise ExplainRequestError(
                f"at most {_NAMES_MAX} names of {_NAME_CHARACTERS_MAX} characters may be given to "
                "what-if"
            )
        term = self._current.term
        if term is None:
            raise self._members.not_leader()
        try:
            # The wait for a slot counts: a queue of explanations must not keep its clients waiting
            # without end.
            async with asyncio.timeout(_GATHER_SECONDS), self._slots:
                situation = await gather(
                    await term.safe_points.view(), self._meta, self._to_capture
                )
        except TimeoutError:
            raise ExplainBusyError(
                f"the situation was not gathered within {_GATHER_SECONDS:g} s; try again"
            ) from None
        most = min(limit or MOST_CHAINS, MOST_CHAINS)
        # In a thread: with many changefeeds it takes long enough to hold up timestamps.
        explanation = await asyncio.to_thread(
            lambda: document(explain(situation, what_if_remove, most))
        )
        # The answer waited for captures and a thread; another may lead by now.
        term.leadership.check()
        return explanation


class ExplainService:
    """The servicer."""

    def __init__(self, explainer: Explainer) -> None:
        self._explainer = explainer

    async def ExplainGC(
        self, request: explain_pb2.ExplainGCRequest, _context: Any
    ) -> explain_pb2.ExplainGCResponse:
        """Chains of blockers, the lowest first."""
        explanation = await self._explainer.explain(list(request.what_if_remove), request.limit)
        return ParseDict(explanation, explain_pb2.ExplainGCResponse())


async def gather(view: GcView, meta: Meta, to_capture: ToCapture) -> Situation:
    """Everything around `view`.

    Raises:
        MetaUnavailableError: the metadata cannot be read.
    """
    answers = await ask_captures(meta, to_capture)
    infos, statuses = await meta.get_prefix(keys.INFOS), await meta.get_prefix(keys.STATUSES)
    # records hold the schemas of all tables
    feeds = await asyncio.to_thread(_feeds, infos, statuses, answers)
    problems = [
        f"capture {capture.id}: {capture.problem}"
        for capture in answers.captures
        if capture.problem
    ]
    problems += [
        f"changefeed {feed.id}: {feed.error}"
        for feed in feeds.values()
        if feed.state == "unreadable"
    ]
    return Situation(view, feeds, tuple(answers.captures), await _worker(meta), tuple(problems))


def _feeds(
    infos: Sequence[KeyValue], statuses: Sequence[KeyValue], answers: CaptureAnswers
) -> dict[str, Feed]:
    checkpoints = {pair.key.removeprefix(keys.STATUSES): pair.value for pair in statuses}
    feeds = [
        _feed(pair, checkpoints.get(pair.key.removeprefix(keys.INFOS)), answers) for pair in infos
    ]
    return {feed.id: feed for feed in feeds}


def _feed(info_pair: KeyValue, status: bytes | None, answers: CaptureAnswers) -> Feed:
    # It brings NumPy and Arrow along, 45 MB that only who is asked to explain has to pay.
    from server.changefeed.info import ChangefeedInfo, checkpoint_of

    name = info_pair.key.removeprefix(keys.INFOS).decode(errors="backslashreplace")
    try:
        info = ChangefeedInfo.from_json(info_pair.value)
        checkpoint_ts = checkpoint_of(status) if status is not None else info.start_ts
    except TidemarkError as err:
        return Feed(name, "unreadable", 0, err.code, err.message)
    capture, tables = answers.running.get(name, ("", ()))
    code, message = (info.error.code, info.error.message) if info.error else ("", "")
    return Feed(name, info.state.value, checkpoint_ts, code, message, capture, tables)


async def _worker(meta: Meta) -> Worker:
    records = MetaRecords(meta)
    try:
        config = await read_config(records)
        recorded = await records.read(LEADER_DESC) | await records.read(LAST_RUN_TIME)
    except (TidemarkError, ValueError) as err:
        return Worker(problem=f"its records cannot be read: {err}")
    leader, last_run = (
        recorded[key].value if key in recorded else "" for key in (LEADER_DESC, LAST_RUN_TIME)
    )
    return Worker(leader, config.enable, config.life_time_ms, config.run_interval_ms, last_run)


async def ask_captures(meta: Meta, to_capture: ToCapture) -> CaptureAnswers:
    """Ask every living capture; takes about `ANSWER_SECONDS` if one is silent,
    more only if many are.
    """
    captures = await _captures(meta)
    slots = asyncio.Semaphore(_CONCURRENT_CAPTURES)

    async def ask(capture: Capture) -> tuple[Capture, capture_pb2.GetBlockersResponse]:
        async with slots:
            return await _ask(capture, to_capture)

    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(ask(capture)) for capture in captures]
    answers = CaptureAnswers()
    for capture, answer in (call.result() for call in calls):
        answers.captures.append(capture)
        for changefeed in answer.changefeeds:
            tables = tuple(map(_table, changefeed.tables))
            answers.running[changefeed.changefeed] = (f"{capture.id} at {capture.address}", tables)
    return answers


async def _captures(meta: Meta) -> list[Capture]:
    """All living captures, the owner last: what it says of a changefeed counts."""
    living = await living_captures(meta)
    captures = [
        Capture(record.id, record.address, record.id == living.owner) for record in living.records
    ]
    captures += [
        Capture(identity, "", identity == living.owner, "its record in the metadata cannot be read")
        for identity in living.unreadable
    ]
    return sorted(captures, key=lambda capture: capture.is_owner)


async def _ask(
    capture: Capture, to_capture: ToCapture
) -> tuple[Capture, capture_pb2.GetBlockersResponse]:
    if capture.problem:
        return capture, capture_pb2.GetBlockersResponse()
    try:
        async with asyncio.timeout(ANSWER_SECONDS), to_capture(capture.address) as channel:
            return capture, await CaptureServiceStub(channel).GetBlockers(
                capture_pb2.GetBlockersRequest()
            )
    except TimeoutError:
        problem = f"no answer within {ANSWER_SECONDS:g} s"
    except grpc.aio.AioRpcError as err:
        problem = f"{err.code().name}: {err.details()}"
    return replace(capture, problem=problem), capture_pb2.GetBlockersResponse()


def _table(message: capture_pb2.TableBlockers) -> Table:
    regions = tuple(map(_region, message.regions))
    return Table(message.name, message.checkpoint_ts, message.resolved_ts, regions)


def _region(message: capture_pb2.RegionBlockers) -> Region:
    locks = tuple(
        Lock(lock.start_ts, lock.primary.hex(), lock.key.hex(), lock.ttl_ms, lock.kind)
        for lock in message.locks
    )
    return Region(
        message.region_id, message.resolved_ts, message.store, locks, message.problem, message.pump
    )
