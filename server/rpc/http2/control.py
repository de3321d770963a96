"""Frames about the connection itself: SETTINGS, PING, GOAWAY; and those that ask for nothing we have."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from server.rpc.http2 import frames
from server.rpc.http2.flood import Patience
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault

if TYPE_CHECKING:
    from server.rpc.http2.connection import Connection
    from server.rpc.http2.stream import Stream

FrameHandler = Callable[[int, int, bytes], None]
"""Of flags, stream and payload."""

_SETTINGS, _SETTINGS_PER_S = 50, 1
_ENABLE_PUSH, _INITIAL_WINDOW, _MAX_FRAME = 2, 4, 5


class Control:
    """Their handlers, over the state of a connection."""

    def __init__(self, connection: "Connection", pings: int, pings_per_s: float, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._pings = Patience("too_many_pings", pings, pings_per_s, clock)
        self._pinged_at_answers = 0
        self._settings = Patience("too many SETTINGS", _SETTINGS, _SETTINGS_PER_S, clock)

    def handlers(self) -> dict[int, FrameHandler]:
        """By the type of frame."""
        return {
            frames.PRIORITY: self._on_priority,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push_promise,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
        }

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of one stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings in it")
            return
        self._settings.spend()
        values = dict(frames.setting_pairs(payload))  # the last of each counts, and is applied once
        for key, value in values.items():
            _check(key, value)
        self._connection.peer_frame_bytes = values.get(_MAX_FRAME, self._connection.peer_frame_bytes)
        if _INITIAL_WINDOW in values:
            self._change_window(values[_INITIAL_WINDOW])
        self._connection.ready = True
        self._connection.send(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _change_window(self, value: int) -> None:
        change, self._connection.initial_window = value - self._connection.initial_window, value
        for stream in list(self._connection.streams.values()):
            self._grow(stream, change)

    def _grow(self, stream: "Stream", change: int) -> None:
        try:
            stream.grow(change)
        except StreamFault as fault:
            raise ConnectionFault(fault.code, str(fault)) from fault

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of one stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of another length than eight")
        if flags & frames.ACK:
            self._connection.awaited_pong = False
            return
        if self._connection.answers != self._pinged_at_answers:
            self._pinged_at_answers = self._connection.answers
            self._pings.refill()
        self._pings.spend()
        self._connection.send(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_goaway(self, _flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of one stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY that is too short")

    def _on_priority(self, _flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        self._connection.empty.spend()
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of another length than five")
        if int.from_bytes(payload[:4]) & frames.MAX_WINDOW == number:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _on_push_promise(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients do not push")


def _check(key: int, value: int) -> None:
    if key == _ENABLE_PUSH and value > 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    if key == _INITIAL_WINDOW and value > frames.MAX_WINDOW:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "an initial window of more than 2^31 - 1 bytes")
    if key == _MAX_FRAME and not frames.MAX_FRAME_BYTES <= value < 1 << 24:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a largest frame that HTTP/2 does not have")
