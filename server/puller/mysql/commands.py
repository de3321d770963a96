"""The commands that ask a server for its log, as packets. Pure.

Source: MySQL's client/server protocol (COM_REGISTER_SLAVE, COM_BINLOG_DUMP, COM_BINLOG_DUMP_GTID).
"""

import struct
from typing import Final

COM_BINLOG_DUMP: Final = 0x12
COM_REGISTER_SLAVE: Final = 0x15
COM_BINLOG_DUMP_GTID: Final = 0x1E
NON_BLOCK: Final = 0x01
"""The server ends its answer at the end of its log."""
_THROUGH_GTID = 0x04
_FIRST_POSITION = 4


def packet(payload: bytes, number: int = 0) -> bytes:
    """A packet with its header; a payload is below 16 MB."""
    assert len(payload) < 0xFFFFFF
    return struct.pack("<I", len(payload) | number << 24) + payload


def register(server_id: int, name: str = "") -> bytes:
    """Say who is going to read, so that `SHOW SLAVE HOSTS` lists us;
    the answer is OK or an error.
    """
    host = name.encode()[:60]
    head = struct.pack("<BIB", COM_REGISTER_SLAVE, server_id, len(host)) + host
    return packet(head + struct.pack("<BBHII", 0, 0, 0, 0, 0))


def dump(server_id: int, file: str = "", position: int = _FIRST_POSITION, flags: int = 0) -> bytes:
    """Ask for events from a place in a file; MariaDB takes the place from `@slave_connect_state`
    where that is set.
    """
    return packet(struct.pack("<BIHI", COM_BINLOG_DUMP, position, flags, server_id) + file.encode())


def dump_gtid(server_id: int, gtids: bytes, flags: int = 0) -> bytes:
    """Ask a MySQL server for all transactions that are not in a set, given in its binary form."""
    head = struct.pack("<BHII", COM_BINLOG_DUMP_GTID, flags | _THROUGH_GTID, server_id, 0)
    return packet(head + struct.pack("<QI", _FIRST_POSITION, len(gtids)) + gtids)
