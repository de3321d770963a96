"""The watches of one client stream (pure): requests in, responses out; the kept events are the only queue.

A watch is a filter and the next revision it has to see. One that falls behind what is kept is cancelled with the
compacted revision, so a slow client costs no memory.
"""

from dataclasses import dataclass

from etcdpb import kv_pb2, rpc_pb2

from storage.meta.errors import CompactedError
from storage.meta.ranges import in_range
from storage.meta.state import State

MAX_WATCHES = 1024
_MAX_EVENTS = 1000


@dataclass(slots=True)
class _Watch:
    asked: rpc_pb2.WatchCreateRequest
    next_revision: int

    def wants(self, event: kv_pb2.Event) -> bool:
        dropped = rpc_pb2.WatchCreateRequest.NODELETE if event.type else rpc_pb2.WatchCreateRequest.NOPUT
        return in_range(event.kv.key, self.asked.key, self.asked.range_end) and dropped not in self.asked.filters


class Watchers:
    """Watches by id; `revision` arguments bound what may be shown (the last durable revision)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._watches: dict[int, _Watch] = {}
        self._next_id = 0

    def handle(self, request: rpc_pb2.WatchRequest, revision: int) -> list[rpc_pb2.WatchResponse]:
        """Answer one request of the stream."""
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            return self._create(request.create_request, revision)
        if kind == "cancel_request":
            watch_id = request.cancel_request.watch_id
            return [_cancelled(watch_id, revision)] if self._watches.pop(watch_id, None) else []
        if kind == "progress_request":
            return [_response(-1, revision)]
        return []

    def advance(self, revision: int) -> list[rpc_pb2.WatchResponse]:
        """What each watch has not seen yet, up to and with `revision`; call again until it is empty."""
        responses: list[rpc_pb2.WatchResponse] = []
        for watch_id, watch in list(self._watches.items()):
            if watch.next_revision < self._state.compact_revision:
                del self._watches[watch_id]
                responses.append(_compacted(watch_id, revision, self._state.compact_revision))
            elif events := self._collect(watch, revision):
                response = _response(watch_id, revision)
                response.events.extend(events)
                responses.append(response)
        return responses

    def _create(self, asked: rpc_pb2.WatchCreateRequest, revision: int) -> list[rpc_pb2.WatchResponse]:
        watch_id = asked.watch_id or self._free_id()
        created = _response(watch_id, revision)
        created.created = True
        if watch_id in self._watches or len(self._watches) >= MAX_WATCHES or not asked.key:
            created.watch_id, created.canceled = -1, True
            created.cancel_reason = "etcdserver: mvcc: duplicate watch ID, no key, or too many watches"
            return [created]
        self._watches[watch_id] = _Watch(asked, asked.start_revision or revision + 1)
        return [created]

    def _free_id(self) -> int:
        while self._next_id in self._watches:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _collect(self, watch: _Watch, revision: int) -> list[kv_pb2.Event]:
        found: list[kv_pb2.Event] = []
        while watch.next_revision <= revision and len(found) < _MAX_EVENTS:
            found += [event for event in self._state.events(watch.next_revision) if watch.wants(event)]
            watch.next_revision += 1
        return found if watch.asked.prev_kv else [_without_previous(event) for event in found]


def _response(watch_id: int, revision: int) -> rpc_pb2.WatchResponse:
    return rpc_pb2.WatchResponse(watch_id=watch_id, header=rpc_pb2.ResponseHeader(revision=revision))


def _cancelled(watch_id: int, revision: int) -> rpc_pb2.WatchResponse:
    response = _response(watch_id, revision)
    response.canceled = True
    return response


def _compacted(watch_id: int, revision: int, compact_revision: int) -> rpc_pb2.WatchResponse:
    response = _cancelled(watch_id, revision)
    response.compact_revision = compact_revision
    response.cancel_reason = CompactedError(compact_revision).message
    return response


def _without_previous(event: kv_pb2.Event) -> kv_pb2.Event:
    return kv_pb2.Event(type=event.type, kv=event.kv)
