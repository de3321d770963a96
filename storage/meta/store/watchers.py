"""The watches of one client stream (pure): requests in, responses out;
the kept events are the only queue.

A watch is a filter and the next revision it is to be sent, so a slow client costs no memory: a
watch that falls behind what is kept is cancelled with the compacted revision. Invariants:

1. A response has whole revisions, in order; a revision is split only for a watch that asked for
   fragments.
2. Responses are made one by one, each of at most `MAX_EVENTS` events or about `MAX_BYTES`, plus its
   last revision.
3. Progress is sent only up to what was sent before: to a watch, or (id -1) to all watches of the
   stream.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.errors import CompactedError
from storage.meta.store.request import in_range
from storage.meta.store.state import State

MAX_WATCHES = 1024
MAX_EVENTS = 1000
MAX_BYTES = 1 << 20

_ALL = -1  # the id of a progress response that is for all watches of the stream

K = TypeVar("K")


class Listener:
    """One stream among the `Subscriptions`; `wake` is called when there is a change for it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._first = 0

    def notify(self, revision: int) -> None:
        """Note that `revision` has a change for this stream."""
        self._first = self._first or revision
        self._wake()

    def take_first(self) -> int:
        """The first revision with a change for this stream since the last call; 0: none."""
        first, self._first = self._first, 0
        return first


class Subscriptions:
    """Which listeners watch which keys, so that a change wakes only those that it is for;
    each may be added repeatedly.

    Invariant: a listener that was not notified since its last `take_first` has missed no change, so
    its watches may skip the revisions in between.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, Counter[Listener]] = {}
        self._ranges: dict[tuple[bytes, bytes], Counter[Listener]] = {}

    def add(self, key: bytes, range_end: bytes, listener: Listener) -> None:
        """Notify `listener` of changes of a key or range from now on."""
        if range_end:
            self._ranges.setdefault((key, range_end), Counter())[listener] += 1
        else:
            self._keys.setdefault(key, Counter())[listener] += 1

    def remove(self, key: bytes, range_end: bytes, listener: Listener) -> None:
        """Undo one `add`."""
        if range_end:
            _decrement(self._ranges, (key, range_end), listener)
        else:
            _decrement(self._keys, key, listener)

    def notify(self, revision: int, events: Iterable[kv_pb2.Event]) -> None:
        """Notify the listeners of the keys that `revision` changed."""
        for event in events:
            key = event.kv.key
            for listener in self._keys.get(key, ()):
                listener.notify(revision)
            for (start, end), listeners in self._ranges.items():
                if in_range(key, start, end):
                    for listener in listeners:
                        listener.notify(revision)


@dataclass(slots=True)
class _Watch:
    request: rpc_pb2.WatchCreateRequest
    next_revision: int
    added_at: int
    """The durable revision when it was added: it is notified of all that is newer."""
    idle: bool = field(default=False)
    """Whether nothing was sent since the last tick."""

    def matches(self, event: kv_pb2.Event) -> bool:
        dropped = (
            rpc_pb2.WatchCreateRequest.NODELETE if event.type else rpc_pb2.WatchCreateRequest.NOPUT
        )
        return (
            in_range(event.kv.key, self.request.key, self.request.range_end)
            and dropped not in self.request.filters
        )


class Watchers:
    """Watches by id; revisions given from outside bound what may be shown (the last durable one).

    With `subscriptions`, which are notified of every durable change, `wake` is called when there is
    something to send, and revisions without a change for this stream are skipped; without them,
    every change is looked at.
    """

    def __init__(
        self,
        state: State,
        subscriptions: Subscriptions | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._subscriptions = subscriptions
        self._listener = Listener(wake)
        self._shown = 0
        self._watches: dict[int, _Watch] = {}
        self._next_id = 0
        self._answers: list[rpc_pb2.WatchResponse] = []
        self._progress_requested = False

    def handle(self, request: rpc_pb2.WatchRequest, revision: int) -> None:
        """Handle one request of the stream; its answer is among the next `responses`."""
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            self._answers.append(self._create(request.create_request, revision))
        elif kind == "cancel_request":
            watch_id = request.cancel_request.watch_id
            if watch_id in self._watches:
                self._remove(watch_id)
                self._answers.append(_cancelled(watch_id, revision))
        elif kind == "progress_request":
            self._progress_requested = True

    def responses(self, durable: Callable[[], int]) -> Iterator[rpc_pb2.WatchResponse]:
        """Return everything to send, until every watch has received the durable revision, which may
        grow meanwhile.
        """
        while True:
            answers, self._answers = self._answers, []
            yield from answers
            shown = durable()
            self._skip(shown)
            behind = [
                watch_id
                for watch_id, watch in self._watches.items()
                if watch.next_revision <= shown
            ]
            for watch_id in behind:
                yield from self._advance(watch_id, shown)
            if not behind and not self._answers:
                break
        if self._progress_requested:
            self._progress_requested = False
            yield _response(_ALL, shown)

    def tick(self, revision: int) -> None:
        """Send progress to watches that asked for it,
        if nothing was sent to them since the last tick.
        """
        for watch_id, watch in self._watches.items():
            if watch.request.progress_notify and watch.idle and watch.next_revision == revision + 1:
                self._answers.append(_response(watch_id, revision))
            watch.idle = True

    def close(self) -> None:
        """End all watches."""
        for watch_id in list(self._watches):
            self._remove(watch_id)

    def _skip(self, shown: int) -> None:
        """Move watches that were up to date to the first change since then that is for this
        stream.
        """
        if self._subscriptions is None:
            return
        first = self._listener.take_first() or shown + 1
        for watch in self._watches.values():
            if watch.next_revision == self._shown + 1 > watch.added_at:
                watch.next_revision = max(watch.next_revision, first)
        self._shown = shown

    def _remove(self, watch_id: int) -> None:
        request = self._watches.pop(watch_id).request
        if self._subscriptions is not None:
            self._subscriptions.remove(request.key, request.range_end, self._listener)

    def _advance(self, watch_id: int, revision: int) -> Iterator[rpc_pb2.WatchResponse]:
        """The next response of a watch, in fragments if it wants them;
        none if no change in a stretch was for it.
        """
        watch = self._watches.get(watch_id)
        if watch is None:
            return
        # What it is yet to be sent is gone: the client reads the present state and watches anew.
        if watch.next_revision < self._state.compact_revision:
            self._remove(watch_id)
            yield _compacted(watch_id, revision, self._state.compact_revision)
        elif events := self._collect(watch, revision):
            watch.idle = False
            if watch.request.fragment:
                yield from _fragments(watch_id, revision, events)
            else:
                yield _response(watch_id, revision, events)

    def _create(self, request: rpc_pb2.WatchCreateRequest, revision: int) -> rpc_pb2.WatchResponse:
        # As in etcd, no key means the first possible one.
        if not request.key:
            request.key = b"\0"
        if fault := self._fault(request):
            refused = _response(-1, revision)
            refused.created = refused.canceled = True
            refused.cancel_reason = fault
            return refused
        watch_id = request.watch_id or self._free_id()
        self._watches[watch_id] = _Watch(request, request.start_revision or revision + 1, revision)
        if self._subscriptions is not None:
            self._subscriptions.add(request.key, request.range_end, self._listener)
        created = _response(watch_id, revision)
        created.created = True
        return created

    def _fault(self, request: rpc_pb2.WatchCreateRequest) -> str:
        if request.range_end not in (b"", b"\0") and request.range_end <= request.key:
            return "mvcc: watcher range is empty"
        if request.watch_id and request.watch_id in self._watches:
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
        collected: list[kv_pb2.Event] = []
        size = 0
        while watch.next_revision <= revision and len(collected) < MAX_EVENTS and size < MAX_BYTES:
            matching = [
                event for event in self._state.events(watch.next_revision) if watch.matches(event)
            ]
            collected += matching if watch.request.prev_kv else map(_without_previous, matching)
            size += sum(event.ByteSize() for event in matching)
            watch.next_revision += 1
        return collected


def _fragments(
    watch_id: int, revision: int, events: list[kv_pb2.Event]
) -> Iterator[rpc_pb2.WatchResponse]:
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


def _response(
    watch_id: int, revision: int, events: list[kv_pb2.Event] | None = None
) -> rpc_pb2.WatchResponse:
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


def _decrement(index: dict[K, Counter[Listener]], place: K, listener: Listener) -> None:
    listeners = index[place]
    listeners[listener] -= 1
    if not listeners[listener]:
        del listeners[listener]
    if not listeners:
        del index[place]
