"""Prepared SELECTs whose rows stay as they arrive: binary-protocol packets in one buffer,
no object per row.

    response = columns n, definition * columns, end, row*, end

A row begins with 0, an end with 254, an error with 255. A packet of 16 MB - 1 goes on in the next
one; such rows are joined. Source: MySQL's protocol documentation.
"""

import socket
import struct
from collections.abc import Generator, Iterator, Sequence
from itertools import takewhile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from server.dump.progress import Cell
from server.puller.mysql.session.connection import Session, answers
from server.puller.mysql.session.errors import MySqlUnavailableError, of_packet
from storage.mysql.buffer import PAD_BYTES, Bytes
from storage.mysql.changes import BINARY_ROW

_PREPARE, _EXECUTE, _CLOSE = 0x16, 0x17, 0x19
_OK, _END, _ERROR = 0x00, 0xFE, 0xFF
_END_BYTES_MAX = 9
_PACKET_BYTES_MAX = 0xFFFFFF
_RECEIVE_BYTES = 1 << 18
_PIECE_BYTES = 1 << 20
_TYPE_AT = -6
"""The offset of the type from the end of a column definition; flags, decimals and two filler bytes
follow it.
"""
_HEAD = struct.Struct("<I")
_PREPARED = struct.Struct("<BIHHxH")
_EXECUTED = struct.Struct("<BIBI")


class Statement:
    """One prepared statement of a session; only the session's thread may use it.

    It lives as long as the session does.
    """

    def __init__(self, session: Session, query: str) -> None:
        """Prepare it.

        Raises:
            MySqlStatementError, MySqlPrivilegeError: the server refuses the query.
            MySqlUnavailableError: the connection broke.
        """
        self._query = query
        self.types: tuple[int, ...] = ()
        """The column types of the last result."""
        self._packets = _Packets(session.raw_socket())
        with answers(f"preparing {query[:80]}"):
            self._packets.send(bytes((_PREPARE,)) + query.encode())
            head = self._checked()
            _, self._id, columns, self.parameters, _ = _PREPARED.unpack_from(head)
            # Definitions of parameters, then of columns, each list with an end if it is not empty.
            for count in (self.parameters, columns):
                for _ in range(count + 1 if count else 0):
                    self._packets.one()

    def rows(self, parameters: Sequence[Cell] = ()) -> pa.Array:
        """Run it; its rows, each behind the format byte of docs/format/mysql-rows.md.

        Raises:
            MySqlStatementError, MySqlPrivilegeError: the server refuses.
            MySqlUnavailableError: the connection broke.
        """
        assert len(parameters) == self.parameters, "each placeholder has its value"
        with answers(f"running {self._query[:80]}"):
            self._packets.send(_EXECUTED.pack(_EXECUTE, self._id, 0, 1) + _bound(parameters))
            columns = self._checked()[0]
            if columns == _OK:
                return pa.array([], pa.binary())
            definitions = iter(self._packets.one, None)
            self.types = tuple(each[_TYPE_AT] for each in takewhile(_is_definition, definitions))
            rows, last = self._packets.rows()
        if last[0] == _ERROR:
            raise of_packet(last, f"running {self._query[:80]}")
        return rows

    def pieces(self) -> Iterator[pa.Array]:
        """Run it; the same rows as they arrive.

        To be used up before anything else is asked of the session.

        Raises: as `rows`.
        """
        with answers(f"running {self._query[:80]}"):
            self._packets.send(_EXECUTED.pack(_EXECUTE, self._id, 0, 1))
            self._checked()
            while not _is_end(self._packets.one()):
                pass
            last = yield from self._packets.pieces()
        if last[0] == _ERROR:
            raise of_packet(last, f"running {self._query[:80]}")

    def close(self) -> None:
        """Forget it at the server."""
        with answers("closing a statement"):
            self._packets.send(struct.pack("<BI", _CLOSE, self._id))

    def _checked(self) -> bytes:
        packet = self._packets.one()
        if packet[0] == _ERROR:
            raise of_packet(packet, f"running {self._query[:80]}")
        return packet


class _Packets:
    """Commands out, packets in, over a session's socket between PyMySQL's own commands."""

    def __init__(self, raw: socket.socket) -> None:
        self._socket = raw
        self._data = bytearray()
        self._at = 0

    def send(self, command: bytes) -> None:
        assert self._at == len(self._data), "a command while an answer is being read"
        self._data, self._at = bytearray(), 0
        packets = bytearray()
        # A command whose size is a multiple of 16 MB - 1 ends with an empty packet: hence `+ 1`.
        for number, begin in enumerate(range(0, len(command) + 1, _PACKET_BYTES_MAX)):
            part = command[begin : begin + _PACKET_BYTES_MAX]
            packets += _HEAD.pack(len(part) | (number & 0xFF) << 24) + part
        self._socket.sendall(packets)

    def one(self) -> bytes:
        """The next packet, joined if it is long."""
        body = b""
        while True:
            begin, end = self._next()
            body += bytes(self._data[begin:end])
            self._at = end
            if end - begin < _PACKET_BYTES_MAX:
                return body

    def rows(self) -> tuple[pa.Array, bytes]:
        """The packets of rows up to the one that ends them, which is the second."""
        bounds: list[int] = []
        parts: list[pa.Array] = []
        while True:
            self._whole_rows(bounds)
            begin, end = self._next()
            if self._data[begin] != _OK:
                parts.append(self._array(bounds))
                return pa.concat_arrays(parts), self.one()
            if end - begin == _PACKET_BYTES_MAX:
                parts += [self._array(bounds), _formatted(pa.array([self.one()], pa.binary()))]
                bounds = []

    def pieces(self) -> Generator[pa.Array, None, bytes]:
        """The same packets, some `_PIECE_BYTES` at a time; returns the one that ends them."""
        bounds: list[int] = []
        while True:
            self._whole_rows(bounds)
            begin, end = self._next()
            ends = self._data[begin] != _OK
            if bounds and (ends or self._at > _PIECE_BYTES or end - begin == _PACKET_BYTES_MAX):
                yield self._array(bounds)
                bounds = []
                # What was given out is dropped: a table's rows would all stay in memory.
                del self._data[: self._at]
                self._at = 0
            elif ends:
                return self.one()
            elif end - begin == _PACKET_BYTES_MAX:
                yield _formatted(pa.array([self.one()], pa.binary()))

    def _whole_rows(self, bounds: list[int]) -> None:
        """Note where each row lies that has arrived,
        up to the first packet that is something else.
        """
        # Runs once for each row of a dump: names are local, and nothing is copied.
        data, at, last = self._data, self._at, len(self._data) - _HEAD.size - 1
        unpack, append = _HEAD.unpack_from, bounds.append
        while at <= last:
            size = unpack(data, at)[0] & _PACKET_BYTES_MAX
            begin = at + _HEAD.size
            if begin + size > len(data) or data[begin] != _OK or size == _PACKET_BYTES_MAX:
                break
            at = begin + size
            append(begin)
            append(at)
        self._at = at

    def _array(self, bounds: list[int]) -> pa.Array:
        pairs = np.array(bounds, np.int64).reshape(-1, 2)
        return _formatted(
            Bytes(bytes(self._data) + bytes(PAD_BYTES)).slices(pairs[:, 0], pairs[:, 1])
        )

    def _next(self) -> tuple[int, int]:
        """Return the bounds of the next packet's body."""
        self._fill(_HEAD.size)
        size = _HEAD.unpack_from(self._data, self._at)[0] & _PACKET_BYTES_MAX
        self._fill(_HEAD.size + size)
        return self._at + _HEAD.size, self._at + _HEAD.size + size

    def _fill(self, size: int) -> None:
        while len(self._data) - self._at < size:
            arrived = self._socket.recv(_RECEIVE_BYTES)
            if not arrived:
                raise MySqlUnavailableError("the server has closed the connection")
            self._data += arrived


def _formatted(rows: pa.Array) -> pa.Array:
    return pc.binary_replace_slice(rows, start=0, stop=0, replacement=bytes((BINARY_ROW,)))


def _is_end(packet: bytes) -> bool:
    # 0xFE also begins a string of 16 MB or more, so an end is told by its size, too.
    return packet[0] == _END and len(packet) < _END_BYTES_MAX


def _is_definition(packet: bytes) -> bool:
    return not _is_end(packet)


def _bound(parameters: Sequence[Cell]) -> bytes:
    if not parameters:
        return b""
    types = b"".join(struct.pack("<H", parameter.type) for parameter in parameters)
    return (
        bytes((len(parameters) + 7) // 8)
        + b"\x01"
        + types
        + b"".join(each.data for each in parameters)
    )
