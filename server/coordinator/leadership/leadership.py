"""One coordinator's right to answer and to write, and the guards of both.

Invariants:

1. Nothing is answered at or after `deadline`: it is counted from before the lease's renewal was
   requested, so no other coordinator can lead earlier, and a process that was stopped and continued
   knows before it hears anything.
2. Every write carries `fence`, the create revision of the leader key: what was on its way when the
   lease ended fails, and a deposed leader can write nothing.
3. A right that ended never comes back; whoever leads again has a new one, and a new term's memory.

`while_leading` and `batch_while_leading` interrupt RPCs when the term ends, so that no client waits
for a coordinator that cannot answer.

`FencedMetadata` is a leader's only access to the metadata, and fences each transaction. It also
knows its own writes by their revisions, so that it recognizes other writers.

`StateGuard` ends a term when another writer changes its state in the metadata, because the term's
memory is wrong from then on. With embedded metadata nobody else can: etcd's API on the
coordinator's port refuses it (`server.coordinator.keys`). A real etcd has ports of its own.
Safepoints and keyspaces are not guarded here: an operator and PD may change them, and
`gcsafepoint.state.stored` follows.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc.aio
import structlog

from gcsafepoint.state.stored import Revisions
from server.coordinator.errors import NotLeaderError
from server.coordinator.keys import COPY_PREFIX, ClusterKeys
from server.rpc.errors import status_of
from server.rpc.front import Answer, BatchHandler
from storage.meta.errors import CompactedError, MetaUnavailableError
from storage.meta.meta import Compare, Get, KeyValue, Meta, Op, TxnResult, WatchEvent

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
MAX_OPS = 100  # of one transaction; etcd allows 128
_PUT_BACK_S = 1.0

_log = structlog.get_logger(__name__)


class Leadership:
    """A held leader key. Without arguments it stands for the lead of a coordinator with embedded
    metadata, which has no competitor.
    """

    def __init__(
        self,
        fence: Sequence[Compare] = (),
        deadline: Callable[[], float] = lambda: math.inf,
        refusal: Callable[[], NotLeaderError] = NotLeaderError,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.fence = tuple(fence)
        self.ended = asyncio.Event()
        self.reason = ""
        """Why it was given up, if there is more to say than that the lease is over."""
        self._clock = clock or time.monotonic
        self.since = self._clock()
        """Monotonic seconds; what was seen before says nothing about it."""
        self._deadline = deadline
        self.refusal = refusal
        """Makes the error for calls after it has ended."""
        self._timeouts: dict[asyncio.Timeout, None] = {}

    @property
    def held(self) -> bool:
        """Whether no other coordinator can lead now."""
        return not self.ended.is_set() and self._clock() < self._deadline()

    def check(self) -> None:
        """Raises: NotLeaderError: another coordinator may lead;
        nothing in memory is to be trusted.
        """
        if not self.held:
            raise self.refusal()

    def end(self, reason: str = "") -> None:
        """Give the right up and interrupt `while_held` blocks. The first reason counts."""
        if not self.ended.is_set():
            self.reason = reason
        # Set before the blocks are interrupted: on their way out they must find the right gone.
        self.ended.set()
        for timeout in self._timeouts:
            timeout.reschedule(0)

    @asynccontextmanager
    async def while_held(self) -> AsyncIterator[None]:
        """Run the block only while the leadership is held.

        Raises:
            NotLeaderError: it was not, or ended meanwhile.
        """
        self.check()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts[timeout] = None
                try:
                    yield
                finally:
                    self._timeouts.pop(timeout, None)
        # A timeout of ours is the end of leading; one that the block raised by itself is passed on.
        except TimeoutError:
            if timeout.expired():
                raise self.refusal() from None
            raise


def while_leading(handler: Any, leadership: Leadership) -> Any:
    """The same gRPC handler; when the leadership ends,
    its calls and streams end with `not leader`.
    """
    functions = {kind: getattr(handler, kind) for kind in _KINDS}
    return handler._replace(
        **{kind: _guarded(call, leadership) for kind, call in functions.items() if call}
    )


def batch_while_leading(function: BatchHandler, leadership: Leadership) -> BatchHandler:
    """The same batch function; when the leadership ends,
    all of its batch are answered with `not leader`.
    """

    async def answers(requests: Sequence[bytes]) -> Sequence[Answer]:
        async with leadership.while_held():
            result = await function(requests)
        # Checked again after the work: the answer may have waited behind a stopped process, and
        # another may lead by now.
        leadership.check()
        return result

    return answers


def _guarded(function: Callable[..., Any], leadership: Leadership) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with leadership.while_held():
                answer = await function(request, context)
            leadership.check()
        except NotLeaderError as err:
            await context.abort(*status_of(err))
        else:
            return answer

    return call


class FencedMetadata:
    """The metadata as a leader may use it; `txn` and `write` are fenced, reads are not."""

    def __init__(self, meta: Meta, leadership: Leadership) -> None:
        self._meta = meta
        self.leadership = leadership
        self._own = Revisions()
        self._under_way: set[asyncio.Future[None]] = set()
        self._uncertain: set[bytes] = set()
        """Keys of writes that may or may not have happened, until they are written again."""

    async def txn(
        self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()
    ) -> TxnResult:
        """Run `Meta.txn` under the fence.

        Raises:
            NotLeaderError: the leader's key is no longer ours; nothing was written.
        """
        fence = self.leadership.fence
        with self._tracking_write(_written([*success, *failure])) as outcome:
            result = await self._meta.txn([*fence, *compares], success, failure)
            outcome.certain = True
            outcome.revision = (
                result.revision if _written(success if result.succeeded else failure) else 0
            )
        # The comparison that failed may be one of the caller's. The fence is checked alone, to tell
        # a lost leader key from that.
        if not result.succeeded and fence and not (await self._meta.txn(fence, ())).succeeded:
            self.leadership.end("the leader's key is no longer ours")
            self.leadership.check()
        return result

    async def write(self, ops: Sequence[Op]) -> None:
        """Write without other conditions; more than `MAX_OPS` go in several transactions,
        in order.
        """
        # Not atomic together: used only where each part is a valid state.
        for part in _parts(ops):
            await self.txn((), part)

    async def foreign_write(self, prefix: bytes, start_revision: int) -> WatchEvent:
        """Wait until another writer writes a key under `prefix`, from `start_revision` on; returns
        the first such write.

        Raises:
            CompactedError: what was written is no longer known.
        """
        async for events in self._meta.watch(prefix, start_revision):
            for event in events:
                if not await self._is_own(event.pair):
                    return event
        raise AssertionError("a watch does not end")

    async def _is_own(self, pair: KeyValue) -> bool:
        if self._under_way and pair.mod_revision not in self._own:
            # the answer that names this revision may still be on its way
            await asyncio.wait(set(self._under_way))
        return pair.mod_revision in self._own or pair.key in self._uncertain

    @contextmanager
    def _tracking_write(self, keys: Sequence[bytes]) -> Iterator["_Outcome"]:
        """Record the keys that the block writes: those of a transaction without an answer stay
        uncertain.
        """
        outcome = _Outcome()
        under_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if keys:
            self._under_way.add(under_way)
        try:
            yield outcome
        finally:
            if not outcome.certain:
                # The transaction may still be carried out: a change of these keys may be our own,
                # and must not end the term as somebody else's.
                self._uncertain.update(keys)
            elif outcome.revision:
                self._own.add(outcome.revision)
                self._uncertain.difference_update(keys)
            self._under_way.discard(under_way)
            under_way.set_result(None)

    async def get(self, key: bytes) -> KeyValue | None:
        """See `Meta.get`."""
        return await self._meta.get(key)

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        return await self._meta.get_prefix(prefix)

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        return self._meta.watch(prefix, start_revision)


class StateGuard:
    """Watches a term's own keys from `start_revision` on, the first that the term has not read."""

    def __init__(self, metadata: FencedMetadata, keys: ClusterKeys, start_revision: int) -> None:
        self._metadata = metadata
        self._start_revision = start_revision
        limits = [keys.path("timestamp"), keys.path("alloc_id")]
        state = [keys.path(tail) for tail in ("raft", "region_label/", "rule_group/", "rules/")]
        self._prefixes = [*limits, *(COPY_PREFIX + key for key in limits), *state]

    async def run(self, put_back: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """End the leadership at the first foreign write, after `put_back` has restored what must
        not be lost.
        """
        # Without a fence the metadata is embedded, which nobody else can write.
        if not self._metadata.leadership.fence:
            return
        async with asyncio.TaskGroup() as tasks:
            for prefix in self._prefixes:
                tasks.create_task(self._watch(prefix, put_back), name=f"state-{prefix.decode()}")

    async def _watch(
        self, prefix: bytes, put_back: Sequence[Callable[[], Awaitable[None]]]
    ) -> None:
        try:
            event = await self._metadata.foreign_write(prefix, self._start_revision)
        except CompactedError:
            reason = f"changes under {prefix.decode()} were compacted before they were seen"
        else:
            change = "deleted" if event.deleted else "written"
            key = event.pair.key.decode(errors="backslashreplace")
            reason = f"{key} was {change} by somebody else at revision {event.pair.mod_revision}"
        leadership = self._metadata.leadership
        if leadership.ended.is_set():
            return
        _log.error(
            "the coordinator's own state was changed: this term ends, the next one reads it afresh",
            reason=reason,
        )
        # Before stepping down: a limit that was set back or deleted would let the next term hand
        # out numbers twice.
        for restore in put_back:
            with suppress(NotLeaderError, MetaUnavailableError, TimeoutError):
                async with asyncio.timeout(_PUT_BACK_S):
                    await restore()
        leadership.end(reason)


@dataclass(slots=True)
class _Outcome:
    """The outcome of a transaction: whether its answer came, and the revision at which it wrote (0:
    none).
    """

    certain: bool = False
    revision: int = 0


def _written(ops: Sequence[Op]) -> list[bytes]:
    return [op.key for op in ops if not isinstance(op, Get)]


def _parts(ops: Sequence[Op]) -> Iterator[list[Op]]:
    rest = iter(ops)
    while part := list(islice(rest, MAX_OPS)):
        yield part
