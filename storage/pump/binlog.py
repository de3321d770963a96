"""The few fields of a `binlog.Binlog` that the Pump needs, read without protobuf stubs. Pure.

Source: tipb binlog.proto (proto2, no packed fields): tp 1, start_ts 2, commit_ts 3, prewrite_key 4,
prewrite_value 5, ddl_query 6, ddl_job_id 7, ddl_schema_state 8. As in any protobuf reader the last
value of a field wins and unknown fields are passed over.
"""

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

from storage.model.errors import InvalidError

_TP, _START_TS, _COMMIT_TS, _PREWRITE_VALUE, _DDL_SCHEMA_STATE = 1, 2, 3, 5, 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TAGS = {number << 3 | _VARINT for number in (1, 2, 3, 7, 8)} | {
    number << 3 | _BYTES for number in (4, 5, 6)
}
_WIDTHS = {_VARINT: 0, _FIXED64: 8, _BYTES: 0, _FIXED32: 4}
_VARINT_BYTES = 10
_NUMBERS = re.compile(rb"(?:[\x08\x10\x18][\x80-\xff]{0,9}[\x00-\x7f])*")
"""tp, start_ts and commit_ts, in any order: the fields that a binlog begins with."""
_KEY_TAG, _VALUE_TAG = 4 << 3 | _BYTES, _PREWRITE_VALUE << 3 | _BYTES
_U64 = (1 << 64) - 1
_MAX_TS = (1 << 63) - 1


class BinlogInvalidError(InvalidError):
    """The payload is not a binlog the Pump can store."""

    code = "ErrBinlogInvalid"


class Kind(enum.IntEnum):
    """`binlog.BinlogType`."""

    PREWRITE = 0
    COMMIT = 1
    ROLLBACK = 2


class Binlog(NamedTuple):
    """A binlog and what orders it; timestamps are TSOs,
    commit_ts is 0 for a prewrite and a rollback.
    """

    kind: int
    start_ts: int
    commit_ts: int
    payload: bytes

    @property
    def is_fake(self) -> bool:
        """Whether it is a Pump's heartbeat: a rollback with start_ts == commit_ts."""
        return self.kind == Kind.ROLLBACK and self.start_ts == self.commit_ts > 0

    @property
    def is_empty(self) -> bool:
        """Whether it carries no transaction: a client's liveness probe, which is not stored."""
        return self.start_ts == self.commit_ts == 0

    @property
    def ts(self) -> int:
        """The timestamp it is filed under."""
        return self.commit_ts or self.start_ts


def parse(payload: bytes) -> Binlog:
    """Read the kind and the timestamps.

    Raises:
        BinlogInvalidError: the bytes are no binlog, or its kind or timestamps make no sense; says
            which.
    """
    kind = start_ts = commit_ts = 0
    for number, value, _, _ in _fields(payload):
        if number == _TP:
            kind = value
        elif number == _START_TS:
            start_ts = value
        elif number == _COMMIT_TS:
            commit_ts = value
    binlog = Binlog(kind, start_ts, commit_ts, payload)
    _check(binlog)
    return binlog


def fake(ts: int) -> bytes:
    """The payload of a heartbeat at `ts`."""
    encoded = _encode_varint(ts)
    return b"\x08\x02\x10" + encoded + b"\x18" + encoded


def outcome(start_ts: int, commit_ts: int) -> bytes:
    """The payload of a commit binlog, or of a rollback (`commit_ts` 0),
    for a prewrite that never got its own.
    """
    kind = Kind.COMMIT if commit_ts else Kind.ROLLBACK
    return (
        b"\x08"
        + bytes([kind])
        + b"\x10"
        + _encode_varint(start_ts)
        + b"\x18"
        + _encode_varint(commit_ts)
    )


def join(commit: bytes, prewrite: bytes) -> bytes:
    """A commit binlog with the prewrite_value and ddl fields of its prewrite,
    byte for byte as those stand there.
    """
    rows_start = _rows_start(prewrite)
    # A reader has thousands of these a second. TiDB writes the fields in their order, so it is
    # enough to know where the rows begin; what is written in another way is taken field by field.
    if rows_start is not None and _rows_start(commit) == len(commit):
        return commit + prewrite[rows_start:]
    return _join_fields(commit, prewrite)


def _rows_start(payload: bytes) -> int | None:
    """Return where prewrite_value begins if it is the last field and all others stand before it;
    the end of a binlog that has none; None: the binlog has other fields, or another order.
    """
    size = len(payload)
    numbers = _NUMBERS.match(payload)
    start = numbers.end() if numbers else 0
    if start + 1 < size and payload[start] == _KEY_TAG and payload[start + 1] < 0x80:
        start += 2 + payload[start + 1]
    if start == size:
        return start
    if start + 1 < size and payload[start] == _VALUE_TAG:
        value_bytes, value_start = _decode_varint(payload, start + 1)
        if value_start + value_bytes == size:
            return start
    return None


def _join_fields(commit: bytes, prewrite: bytes) -> bytes:
    from_commit = [
        commit[start:end] for number, _, start, end in _fields(commit) if not _from_prewrite(number)
    ]
    from_prewrite = [
        prewrite[start:end] for number, _, start, end in _fields(prewrite) if _from_prewrite(number)
    ]
    return b"".join(from_commit + from_prewrite)


def _from_prewrite(number: int) -> bool:
    return _PREWRITE_VALUE <= number <= _DDL_SCHEMA_STATE


def _check(binlog: Binlog) -> None:
    kind, start_ts, commit_ts, _ = binlog
    if kind > Kind.ROLLBACK:
        raise BinlogInvalidError(f"binlog of unknown type {kind} at start_ts {start_ts}")
    if (start_ts | commit_ts) > _MAX_TS:
        raise BinlogInvalidError(f"negative timestamp: start_ts {start_ts}, commit_ts {commit_ts}")
    if kind == Kind.COMMIT and commit_ts <= start_ts and not binlog.is_empty:
        raise BinlogInvalidError(
            f"commit binlog with commit_ts {commit_ts} not after start_ts {start_ts}"
        )


def _fields(payload: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(number, varint value or 0, start, end) of each field; start includes the tag."""
    at, size = 0, len(payload)
    while at < size:
        start = at
        tag, at = (payload[at], at + 1) if payload[at] < 0x80 else _decode_varint(payload, at)
        wire_type, value = tag & 7, 0
        if tag not in _TAGS and (tag >> 3 <= _DDL_SCHEMA_STATE or wire_type not in _WIDTHS):
            raise BinlogInvalidError(
                f"not a binlog: field {tag >> 3} with wire type {wire_type} at byte {start}"
            )
        if wire_type in (_VARINT, _BYTES) and at < size and payload[at] < 0x80:
            value, at = payload[at], at + 1
        elif wire_type in (_VARINT, _BYTES):
            value, at = _decode_varint(payload, at)
        if wire_type != _VARINT:
            at += value + _WIDTHS[wire_type]
            value = 0
        if at > size:
            raise BinlogInvalidError(
                f"unexpected EOF: field {tag >> 3} ends at byte {at}, the payload at {size}"
            )
        yield tag >> 3, value, start, at


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + _VARINT_BYTES]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _U64, at
        shift += 7
    raise BinlogInvalidError(f"unexpected EOF: a number without an end before byte {at}")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
