"""The watches of one client stream (pure): requests in, responses out; the kept events are the only queue.

A watch is a filter and the next revision it has to see, so a slow client costs no memory: one that falls behind what is
kept is cancelled with the compacted revision. Invariants:

1. A response holds whole revisions, in order; a revision is in pieces only for a watch that asked for fragments.
2. Responses are made one by one, each of at most `MAX_EVENTS` events or about `MAX_BYTES`, plus its last revision.
3. Progress is told only for what was shown: to a watch, or (id -1) to all watches of the stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.errors import CompactedError
from storage.meta.store.interest import Interest, Listener
from storage.meta.store.ranges import in_range
from storage.meta.store.state import State

MAX_WATCHES = 1024
MAX_EVENTS = 1000
MAX_BYTES = 1 << 20

_ALL = -1


@dataclass(slots=True)
class _Watch:
    asked: rpc_pb2.WatchCreateRequest
    next_revision: int
    added_at: int
    """The durable revision when it was added: it hears of all that is newer."""
    idle: bool = field(default=False)
    """Nothing was sent since progress was last looked at."""

    def wants(self, event: kv_pb2.Event) -> bool:
        dropped = rpc_pb2.WatchCreateRequest.NODELETE if event.type else rpc_pb2.WatchCreateRequest.NOPUT
        return in_range(event.kv.key, self.asked.key, self.asked.range_end) and dropped not in self.asked.filters


class Watchers:
    """Watches by id; revisions given from outside bound what may be shown (the last durable one).

    With an `interest` that is told of every durable change, `wake` is called when there is something to show, and
    stretches without anything are skipped; without one, every change is looked at.
    """

    def __init__(self, state: State, interest: Interest | None = None, wake: Callable[[], None] = lambda: None) -> None:
        self._state = state
        self._interest = interest
        self._listener = Listener(wake)
        self._shown = 0
        self._watches: dict[int, _Watch] = {}
        self._next_id = 0
        self._answers: list[rpc_pb2.WatchResponse] = []
        self._progress_asked = False

    def handle(self, request: rpc_pb2.WatchRequest, revision: int) -> None:
        """Take one request of the stream; its answer is among the next `responses`."""
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            self._answers.append(self._create(request.create_request, revision))
        elif kind == "cancel_request":
            watch_id = request.cancel_request.watch_id
            if watch_id in self._watches:
                self._forget(watch_id)
                self._answers.append(_cancelled(watch_id, revision))
        elif kind == "progress_request":
            self._progress_asked = True

    def responses(self, durable: Callable[[], int]) -> Iterator[rpc_pb2.WatchResponse]:
        """All there is to send, until every watch has seen the durable revision; that may grow meanwhile."""
        while True:
            answers, self._answers = self._answers, []
            yield from answers
            shown = durable()
            self._skip(shown)
            behind = [watch_id for watch_id, watch in self._watches.items() if watch.next_revision <= shown]
            for watch_id in behind:
                yield from self._advance(watch_id, shown)
            if not behind and not self._answers:
                break
        if self._progress_asked:
            self._progress_asked = False
            yield _response(_ALL, shown)

    def tick(self, revision: int) -> None:
        """Tell watches that want it how far they are, if nothing was sent to them since the last tick."""
        for watch_id, watch in self._watches.items():
            if watch.asked.progress_notify and watch.idle and watch.next_revision == revision + 1:
                self._answers.append(_response(watch_id, revision))
            watch.idle = True

    def close(self) -> None:
        """End all watches."""
        for watch_id in list(self._watches):
            self._forget(watch_id)

    def _skip(self, shown: int) -> None:
        """Watches that had seen all before, and listened since, go on from the first change that is for one of them."""
        if self._interest is None:
            return
        first = self._listener.heard() or shown + 1
        for watch in self._watches.values():
            if watch.next_revision == self._shown + 1 > watch.added_at:
                watch.next_revision = max(watch.next_revision, first)
        self._shown = shown

    def _forget(self, watch_id: int) -> None:
        asked = self._watches.pop(watch_id).asked
        if self._interest is not None:
            self._interest.remove(asked.key, asked.range_end, self._listener)

    def _advance(self, watch_id: int, revision: int) -> Iterator[rpc_pb2.WatchResponse]:
        """The next response of a watch, in pieces if it wants that; none if nothing in a stretch was for it."""
        watch = self._watches.get(watch_id)
        if watch is None:
            return
        if watch.next_revision < self._state.compact_revision:
            self._forget(watch_id)
            yield _compacted(watch_id, revision, self._state.compact_revision)
        elif events := self._collect(watch, revision):
            watch.idle = False
            if watch.asked.fragment:
                yield from _fragments(watch_id, revision, events)
            else:
                yield _response(watch_id, revision, events)

    def _create(self, asked: rpc_pb2.WatchCreateRequest, revision: int) -> rpc_pb2.WatchResponse:
        if not asked.key:
            asked.key = b"\0"
        if fault := self._fault(asked):
            refused = _response(-1, revision)
            refused.created = refused.canceled = True
            refused.cancel_reason = fault
            return refused
        watch_id = asked.watch_id or self._free_id()
        self._watches[watch_id] = _Watch(asked, asked.start_revision or revision + 1, revision)
        if self._interest is not None:
            self._interest.add(asked.key, asked.range_end, self._listener)
        created = _response(watch_id, revision)
        created.created = True
        return created

    def _fault(self, asked: rpc_pb2.WatchCreateRequest) -> str:
        if asked.range_end not in (b"", b"\0") and asked.range_end <= asked.key:
            return "mvcc: watcher range is empty"
        if asked.watch_id and asked.watch_id in self._watches:
            return "mvcc: duplicate watch ID provided on the WatchStream"
        if len(self._watches) >= MAX_WATCHES:
            return f"etcdserver: {MAX_WATCHES} watches are on this stream; open another one"
        return ""

    def _free_id(self) -> int:
        while self._next_id in self._watches:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _collect(self, watch: _Watch, revision: int) -> list[kv_pb2.Event]:
        found: list[kv_pb2.Event] = []
        size = 0
        while watch.next_revision <= revision and len(found) < MAX_EVENTS and size < MAX_BYTES:
            fresh = [event for event in self._state.events(watch.next_revision) if watch.wants(event)]
            found += fresh if watch.asked.prev_kv else map(_without_previous, fresh)
            size += sum(event.ByteSize() for event in fresh)
            watch.next_revision += 1
        return found


def _fragments(watch_id: int, revision: int, events: list[kv_pb2.Event]) -> Iterator[rpc_pb2.WatchResponse]:
    """The events in responses of about `MAX_BYTES`; all but the last are marked."""
    piece: list[kv_pb2.Event] = []
    size = 0
    for event in events:
        if piece and size + event.ByteSize() > MAX_BYTES:
            response = _response(watch_id, revision, piece)
            response.fragment = True
            yield response
            piece, size = [], 0
        piece.append(event)
        size += event.ByteSize()
    yield _response(watch_id, revision, piece)


def _response(watch_id: int, revision: int, events: list[kv_pb2.Event] | None = None) -> rpc_pb2.WatchResponse:
    header = rpc_pb2.ResponseHeader(revision=revision)
    return rpc_pb2.WatchResponse(watch_id=watch_id, header=header, events=events or ())


def _cancelled(watch_id: int, revision: int) -> rpc_pb2.WatchResponse:
    response = _response(watch_id, revision)
    response.canceled = True
    return response


def _compacted(watch_id: int, revision: int, compact_revision: int) -> rpc_pb2.WatchResponse:
    response = _cancelled(watch_id, revision)
    response.compact_revision = compact_revision
    response.cancel_reason = CompactedError.text
    return response


def _without_previous(event: kv_pb2.Event) -> kv_pb2.Event:
    return kv_pb2.Event(type=event.type, kv=event.kv)
