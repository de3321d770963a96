"""Events as a server would write them, for tests:
the other direction of what `storage.mysql` reads.
"""

import itertools
import struct
from collections.abc import Collection, Sequence

import pyarrow as pa

from storage.mysql.buffer import PAD_BYTES
from storage.mysql.event import Events, EventType, split_events

Cell = bytes | None
Row = tuple[Sequence[Cell], Sequence[Cell]] | tuple[Sequence[Cell]]
VARCHAR, LONG, LONGLONG, VARCHAR_COMPRESSED = 15, 3, 8, 141


def event(kind: int, body: bytes, *, timestamp: int = 1, flags: int = 0) -> bytes:
    return struct.pack("<IBIIIH", timestamp, kind, 1, 19 + len(body), 0, flags) + body


def packed(number: int) -> bytes:
    return bytes((number,)) if number < 251 else b"\xfc" + struct.pack("<H", number)


def bitmap(bits: Sequence[bool]) -> bytes:
    return sum(bit << place for place, bit in enumerate(bits)).to_bytes(
        (len(bits) + 7) // 8, "little"
    )


def table_map(
    table_id: int, table: str, columns: Sequence[tuple[int, int]], key: Sequence[int] = (0,)
) -> bytes:
    """The body for columns of (type, meta): VARCHAR with its size, or types without meta."""
    sized = (VARCHAR, VARCHAR_COMPRESSED)
    metas = b"".join(struct.pack("<H", meta) for kind, meta in columns if kind in sized)
    names = b"".join(
        packed(len(f"c{place}")) + f"c{place}".encode() for place in range(len(columns))
    )
    places = b"".join(packed(place) for place in key)
    return b"".join(
        [
            table_id.to_bytes(6, "little")
            + b"\1\0\4shop\0"
            + packed(len(table))
            + table.encode()
            + b"\0",
            packed(len(columns)) + bytes(kind for kind, _ in columns) + packed(len(metas)) + metas,
            bitmap([place not in key for place in range(len(columns))]),
            b"\x04" + packed(len(names)) + names + b"\x08" + packed(len(places)) + places,
        ]
    )


def image(columns: Sequence[tuple[int, int]], cells: Sequence[Cell]) -> bytes:
    parts = [bitmap([cell is None for cell in cells])]
    for (kind, meta), cell in zip(columns, cells, strict=True):
        if cell is not None:
            size = len(cell).to_bytes(1 if meta < 256 else 2, "little") if kind == VARCHAR else b""
            parts.append(size + cell)
    return b"".join(parts)


def rows(
    kind: EventType,
    table_id: int,
    columns: Sequence[tuple[int, int]],
    images: Sequence[Sequence[Cell]],
    lacking: Sequence[Collection[int]] = ((), ()),
) -> bytes:
    """The body of a row event; an update's images come in pairs. The first, and the second, images
    are `lacking` the columns of these places.
    """
    v2 = kind in {EventType.WRITE_ROWS, EventType.UPDATE_ROWS, EventType.DELETE_ROWS}
    update = kind in {EventType.UPDATE_ROWS, EventType.UPDATE_ROWS_V1}
    head = table_id.to_bytes(6, "little") + b"\0\0" + (b"\x05\0abc" if v2 else b"")
    places = [
        [place for place in range(len(columns)) if place not in each]
        for each in lacking[: 2 if update else 1]
    ]
    present = b"".join(bitmap([place in each for place in range(len(columns))]) for each in places)
    parts = [
        image([columns[place] for place in each], [cells[place] for place in each])
        for cells, each in zip(images, itertools.cycle(places))
    ]
    return head + packed(len(columns)) + present + b"".join(parts)


def events(parts: Sequence[bytes]) -> Events:
    data = b"".join(parts)
    found, end = split_events(data + bytes(PAD_BYTES), checksums=False, end=len(data))
    assert end == len(data)
    return found


def payload(plain: bytes, *, zstd: bool = True, claimed: int | None = None) -> bytes:
    """A TRANSACTION_PAYLOAD of events, which claims to hold so many bytes."""
    content = pa.compress(plain, codec="zstd", asbytes=True) if zstd else plain
    fields = [
        (1, len(content)),
        (2, 0 if zstd else 255),
        (3, len(plain) if claimed is None else claimed),
    ]
    head = b"".join(b"%c\x09\xfe%s" % (kind, value.to_bytes(8, "little")) for kind, value in fields)
    return event(EventType.TRANSACTION_PAYLOAD, head + b"\0" + content)
