"""Packets of a log connection, however they arrive: whole, in parts, beyond 16 MB,
with errors among them.
"""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.log import packets as commands
from server.puller.mysql.log.packets import Packets
from server.puller.mysql.session.errors import (
    LogBehindError,
    LogDamagedError,
    LogPurgedError,
    ServerIdTakenError,
)
from storage.model.errors import CorruptError
from storage.mysql.event import PACKET_BYTES_MAX, EventChecksumError, EventType
from tests.unit.storage.mysql.encode import event


def packet(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def bodies(packets: Packets, data: bytes, sizes: list[int]) -> list[bytes]:
    found, at = [], 0
    for size in [*sizes, len(data)]:
        assert packets.wanted > 0
        for events in packets.take(data[at : at + size]):
            found += [events.body(number) for number in range(len(events))]
        at += size
    return found


@given(
    st.lists(st.binary(max_size=40), max_size=20),
    st.lists(st.integers(0, 60), max_size=20),
    st.booleans(),
)
def test_any_parts_give_the_same_events(
    contents: list[bytes], sizes: list[int], checksums: bool
) -> None:
    whole = [event(EventType.XID, body + b"sum!" * checksums) for body in contents]
    stream = b"".join(packet(b"\0" + each) for each in whole)
    assert bodies(Packets(checksums=checksums), stream, sizes) == contents


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.binary(max_size=9), max_size=4)), max_size=6),
    st.lists(st.integers(0, 90), max_size=20),
    st.booleans(),
)
def test_each_file_says_whether_checksums_follow(
    files: list[tuple[bool, list[bytes]]], sizes: list[int], agreed: bool
) -> None:
    """Its FORMAT_DESCRIPTION has one in any case; the mark of another file before it is as the file
    before.
    """
    stream, expected, follow = b"", [], agreed
    for checksums, contents in files:
        stream += packet(b"\0" + summed(EventType.ROTATE, b"file", checksums=follow))
        description = bytes(57) + bytes([checksums])
        stream += packet(b"\0" + summed(EventType.FORMAT_DESCRIPTION, description))
        expected += [b"file", *contents]
        for body in contents:
            stream += packet(b"\0" + summed(EventType.XID, body, checksums=checksums))
        follow = checksums
    packets = Packets(checksums=agreed, verify=True)
    found = [body for body in bodies(packets, stream, sizes) if len(body) < 58]
    assert found == expected


def summed(kind: EventType, body: bytes, *, checksums: bool = True) -> bytes:
    """An event with its CRC32, if it has one."""
    if not checksums:
        return event(kind, body)
    whole = event(kind, body + bytes(4))
    return whole[:-4] + struct.pack("<I", zlib.crc32(whole[:-4]))


@pytest.mark.parametrize("extra", [-20, 0, 1, PACKET_BYTES_MAX])
def test_an_event_of_16_mb_is_joined(extra: int) -> None:
    body = bytes(PACKET_BYTES_MAX - 1 - 19 + extra)
    data = b"\0" + event(EventType.WRITE_ROWS_V1, body)
    parts = [data[at : at + PACKET_BYTES_MAX] for at in range(0, len(data), PACKET_BYTES_MAX)]
    if len(parts[-1]) == PACKET_BYTES_MAX:
        parts.append(b"")
    stream = b"".join(map(packet, parts)) + packet(b"\0" + event(EventType.XID, b"after"))
    assert [len(each) for each in bodies(Packets(checksums=False), stream, [7, 1 << 20])] == [
        len(body),
        5,
    ]


def test_a_damaged_event_is_seen_by_its_checksum_unless_it_is_trusted() -> None:
    whole = event(EventType.XID, b"body" + bytes(4))
    crc = struct.pack("<I", zlib.crc32(whole[:-4]))
    for damage, verify in ((False, True), (True, False)):
        data = packet(b"\0" + whole[:-4] + crc).replace(b"body", b"bodi" if damage else b"body")
        assert len(bodies(Packets(checksums=True, verify=verify), data, [])) == 1
    with pytest.raises(EventChecksumError):
        Packets(checksums=True, verify=True).take(
            packet(b"\0" + whole[:-4] + crc).replace(b"body", b"bodi")
        )


def error(number: int, text: str) -> bytes:
    return packet(struct.pack("<BH", 0xFF, number) + b"#HY000" + text.encode())


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (1236, "Could not find first log file name in binary log index file", LogPurgedError),
        (1236, "Could not find GTID state requested by slave in any binlog files. Probably the slave state is too old",
         LogPurgedError),
        (1236, "Cannot replicate because the source purged required binary logs; it has purged required binary logs",
         LogPurgedError),
        (1236, "Error: connecting slave requested to start from GTID 0-1-9, which is not in the master's binlog",
         LogBehindError),
        (1236, "Client requested master to start replication from impossible position", LogBehindError),
        (1236, "bogus data in log event; the first event", LogDamagedError),
        (4052, "A slave with the same server_uuid/server_id as this slave has connected to the master",
         ServerIdTakenError),
    ],
)  # fmt: skip
def test_each_refusal_has_its_own_error(number: int, text: str, expected: type[Exception]) -> None:
    with pytest.raises(expected, match=str(number)):
        Packets(checksums=False).take(error(number, text))


def test_the_end_of_a_log_that_is_not_followed_is_seen() -> None:
    packets = Packets(checksums=False)
    assert packets.take(packet(b"\xfe\0\0\2\0")) == []
    assert packets.ended


@pytest.mark.parametrize("payload", [b"\x07", b"\0" + bytes(5), b"\xef" + bytes(40)])
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptError):
        Packets(checksums=False).take(packet(payload))


def test_commands_are_those_of_the_protocol() -> None:
    assert (
        commands.register(7, "h").hex()
        == "13000000" + "15" + "07000000" + "0168" + "0000" + "0000" + "00000000" * 2
    )
    assert (
        commands.dump(7, "f", 4, commands.NON_BLOCK).hex()
        == "0c000000" + "12" + "04000000" + "0100" + "07000000" + "66"
    )
    gtids = commands.dump_gtid(7, b"\1\2")
    assert gtids.hex() == "190000001e040007000000000000000400000000000000020000000102"
