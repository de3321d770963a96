"""The pump's routes on its HTTP port: the paths and documents of the original Pump.

What HTTP's threads ask for runs on the pump's event loop.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError
from tipb import binlog_pb2

from server.pump.registry import PUMPS, PumpLifecycle, read_entry
from server.pump.upkeep import GarbageCollector
from server.routes import Answer, Handler, Request, Route, answered, json_answer
from storage.meta.meta import Meta
from storage.model.errors import InvalidError
from storage.pump.storage import PumpStorage

_MAX_TS = (1 << 63) - 1
_MAX_TS_DIGITS = len(str(_MAX_TS))


class TimestampInvalidError(InvalidError):
    """A path ends in something that is no timestamp."""

    code = "ErrAPIInvalidParam"


class HttpApi:
    """Made on the event loop that the calls run on."""

    def __init__(
        self, storage: PumpStorage, meta: Meta, steering: PumpLifecycle, collector: GarbageCollector
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._storage = storage
        self._meta = meta
        self._steering = steering
        self._collector = collector

    def handlers(self) -> Mapping[Route, Handler]:
        """The handlers, for `Routes.serving`."""
        return {
            ("GET", "/status"): lambda _: self._answer(self._status()),
            ("GET", "/debug/binlog/"): lambda request: self._answer(self._binlog(request.tail)),
            ("POST", "/debug/gc/trigger"): lambda _: self._answer(self._gc()),
            ("PUT", "/state/"): self.change_state,
        }

    def change_state(self, request: Request) -> Answer:
        """`/state/{nodeId}/{action}`: pause or close."""
        node_id, _, action = request.tail.rpartition("/")

        async def changed() -> Answer:
            await self._steering.apply(node_id, action)
            return json_answer(
                {"message": f"apply action {action} success!", "code": 200, "data": None}
            )

        return self._answer(changed())

    async def _status(self) -> Answer:
        """All pumps of the cluster, as they are in the registry; `ErrMsg` names entries of which
        that cannot be told.
        """
        pumps: dict[str, object] = {}
        unreadable: list[str] = []
        for pair in await self._meta.get_prefix(PUMPS):
            name = pair.key.removeprefix(PUMPS).decode(errors="replace")
            entry = read_entry(pair.value)
            if entry is None:
                unreadable.append(name)
            else:
                pumps[name] = entry
        return json_answer(
            {
                "StatusMap": pumps,
                "CommitTS": self._storage.max_commit_ts,
                "Checkpoint": {},
                "ErrMsg": f"unreadable entries: {', '.join(unreadable)}" if unreadable else "",
            }
        )

    async def _binlog(self, tail: str) -> Answer:
        """The binlog filed under a timestamp, as text; a prewrite with its rows."""
        if not tail.isdecimal() or len(tail) > _MAX_TS_DIGITS or int(tail) > _MAX_TS:
            raise TimestampInvalidError(
                f"{tail!r} is not a timestamp; write /debug/binlog/TSO, a number up to 2^63 - 1"
            )
        return Answer(200, binlog_text(await self._storage.get(int(tail))).encode())

    async def _gc(self) -> Answer:
        """GC now, by the retention's age; answers when it is done,
        or else that it has not ended yet.
        """
        return json_answer((await self._collector.collect())._asdict())

    def _answer(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return answered(call, self._loop)


def binlog_text(payload: bytes) -> str:
    """A stored binlog for people: a prewrite with its rows;
    bytes that are no message of their kind, as hexadecimal.

    The pump stores what TiDB sends without reading the rows, so they may be anything.
    """
    try:
        binlog = binlog_pb2.Binlog.FromString(payload)
    except DecodeError:
        return f"not a binlog.Binlog, {len(payload)} bytes: {payload.hex()}\n"
    value = binlog.prewrite_value
    # Its rows are shown below, decoded; as bytes they would fill the screen.
    binlog.ClearField("prewrite_value")
    parts = [text_format.MessageToString(binlog, as_one_line=True), _rows_text(value)]
    return "\n\n PrewriteValue: \n".join(part for part in parts if part) + "\n"


def _rows_text(value: bytes) -> str:
    try:
        return text_format.MessageToString(
            binlog_pb2.PrewriteValue.FromString(value), as_one_line=True
        )
    except DecodeError:
        return f"not a binlog.PrewriteValue, {len(value)} bytes: {value.hex()}"
