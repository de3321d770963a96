"""Row events: the table of each one (`TableMaps`), and the places of the row images in it
(`find_images`).

    body     = table_id u48, flags u16, (extra size u16, extra)?, columns n,
               present bitmap (twice in updates), rows
    row      = image of an insert or delete | image before, image after of an update

The extra part is in v2 only. The end of an image is found by reading it, so images are found in
waves: the k-th image of all events of a batch at once, until each event's end; the images of the
few longest events are found one by one. Source: MySQL's Rows_event.

Images must have all columns, but those that nobody reads (`completed`): MariaDB 11.8 leaves
generated columns, and the hashes of long unique keys, out of UPDATE and DELETE.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError, InvalidError
from storage.mysql.buffer import Bytes, Mask, Offsets, reading
from storage.mysql.event import (
    HEADER_BYTES,
    UPDATE_ROWS,
    Events,
    EventType,
    EventUnsupportedError,
    join_events,
)
from storage.mysql.image import Shape
from storage.mysql.table_map import ID_BYTES, TableMap

WAVE_ROWS_MIN: Final = 24
"""When fewer events than that have images left, it is cheaper to find these one by one."""
IDS_MAX: Final = 4096
"""The most table ids that are kept: far more than one statement has tables."""
SHAPES_MAX: Final = 16_384
"""The most parsed table maps that are kept; one takes some kilobytes."""
_TOO_LONG = (
    "a row image reaches beyond the end of its event: the event, or the TABLE_MAP before it, is "
    "damaged"
)
_V1_HEAD_BYTES = ID_BYTES + 2
_IS_V2, _IS_UPDATE = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
_IS_V2[[EventType.WRITE_ROWS, EventType.UPDATE_ROWS, EventType.DELETE_ROWS]] = True
_IS_UPDATE[list(UPDATE_ROWS)] = True
# an event without rows, which only ends a statement
_DUMMY_TABLE_IDS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFF})


class RowImageError(InvalidError):
    """A row event does not hold all columns of its rows."""

    code = "ErrRowImageNotFull"


@dataclass(frozen=True, slots=True)
class TableRows:
    """The row events of one table in one version: their numbers, ascending."""

    table: TableMap
    numbers: Offsets


@dataclass(frozen=True, slots=True)
class Images:
    """Row images in log order: `[begin, end)` in the events' data,
    and the number of the event each is of.
    """

    begin: Offsets
    end: Offsets
    event: Offsets


class TableMaps:
    """The TABLE_MAP events of a log, by table id; cleared when the server or its log begins anew.

    A server whose table cache is full gives a table another id each time it opens it, so there is
    no bound on the ids. Those of the oldest TABLE_MAP events are dropped: each statement has new
    ones before its rows.
    """

    def __init__(self, *, mariadb: bool) -> None:
        self._mariadb = mariadb
        self._tables: dict[int, tuple[bytes, TableMap]] = {}
        """The table maps by number, the newest last: the event's body, and its parsed form."""
        self._parsed: dict[bytes, TableMap] = {}
        """The parsed table maps by event body without the number."""

    def clear(self) -> None:
        """Drop all table ids: another log begins (FORMAT_DESCRIPTION, a real ROTATE)."""
        self._tables.clear()
        self._parsed.clear()

    def group(self, events: Events) -> list[TableRows]:
        """The row events of `events` by table.

        A table id may get another meaning among them.

        Raises:
            CorruptError: a row event has a table id without a TABLE_MAP event before it.
            EventUnsupportedError: an event holds rows that cannot be known from it.
        """
        types = events.types
        if bool((types == EventType.PARTIAL_UPDATE_ROWS).any()):
            raise EventUnsupportedError(
                "the log holds partial JSON updates: SET GLOBAL binlog_row_value_options='' on "
                "the server, and begin the changefeed after that"
            )
        # Before these events: the ids of their own TABLE_MAP events are needed to their end.
        self._drop_oldest()
        maps = events.of(EventType.TABLE_MAP)
        groups: list[TableRows] = []
        for first, last in self._stretches(events, maps):
            self._learn(events, maps[(maps >= first) & (maps < last)])
            groups += self._grouped(events, events.rows, first, last)
        return _joined(groups)

    def _stretches(self, events: Events, maps: Offsets) -> Iterator[tuple[int, int]]:
        """Parts of `events` within which a table id has one meaning: nearly always one part."""
        borders = [0, *self._new_meanings(events, maps), len(events)]
        return itertools.pairwise(borders)

    def _new_meanings(self, events: Events, maps: Offsets) -> list[int]:
        """The numbers of the TABLE_MAP events that give a table id another meaning than it had."""
        ids = _table_ids(events, maps)
        offsets: list[int] = []
        for table_id in np.unique(ids).tolist():
            maps_of_id = maps[ids == table_id]
            former = self._tables.get(table_id)
            if former is not None and former[0] != events.body(int(maps_of_id[0])):
                offsets.append(int(maps_of_id[0]))
            offsets += maps_of_id[1:][_differs(events, maps_of_id)].tolist()
        return sorted(offsets)

    def _learn(self, events: Events, maps: Offsets) -> None:
        ids = _table_ids(events, maps)
        for table_id, at in zip(*np.unique(ids, return_index=True), strict=True):
            body = events.body(int(maps[at]))
            meaning = self._tables.pop(int(table_id), None)
            if meaning is None or meaning[0] != body:
                meaning = body, self._parse(body)
            self._tables[int(table_id)] = meaning

    def _parse(self, body: bytes) -> TableMap:
        without_id = body[ID_BYTES:]
        if without_id not in self._parsed:
            self._parsed[without_id] = TableMap.parse(body, mariadb=self._mariadb)
        return self._parsed[without_id]

    def _drop_oldest(self) -> None:
        for table_id in list(itertools.islice(self._tables, max(0, len(self._tables) - IDS_MAX))):
            del self._tables[table_id]
        if len(self._parsed) > SHAPES_MAX:
            # Those of known ids stay, so that a table keeps the same object.
            self._parsed = {body[ID_BYTES:]: table for body, table in self._tables.values()}

    def _grouped(self, events: Events, rows: Offsets, first: int, last: int) -> list[TableRows]:
        rows = rows[(rows >= first) & (rows < last)]
        ids = _table_ids(events, rows)
        groups = []
        for table_id in np.unique(ids).tolist():
            if table_id in _DUMMY_TABLE_IDS:
                continue
            if table_id not in self._tables:
                raise CorruptError(
                    f"rows of a table ({table_id}) that no TABLE_MAP told of: begin at a GTID"
                )
            groups.append(TableRows(self._tables[table_id][1], rows[ids == table_id]))
        return groups


def _joined(groups: list[TableRows]) -> list[TableRows]:
    """One group for each table and shape.

    A server that flushes its tables gives a table another id in the middle of a transaction: the
    changes of a row before and after that must be folded into one, in order.
    """
    if len({(group.table.schema, group.table.table) for group in groups}) == len(groups):
        return groups
    same: dict[TableMap, list[TableRows]] = {}
    for group in groups:
        same.setdefault(group.table, []).append(group)
    return [
        TableRows(each[0].table, np.sort(np.concatenate([group.numbers for group in each])))
        for each in same.values()
    ]


def find_images(
    events: Events, rows: TableRows, shape: Shape, *, wave_rows_min: int = WAVE_ROWS_MIN
) -> Images:
    """Return where the images of these row events lie.

    Raises:
        RowImageError: an event does not hold all columns.
        CorruptError: the rows of an event do not end where it does.
    """
    with reading(f"a row event of {rows.table.name}"):
        at = _first_images(events, rows)
        stop = events.end[rows.numbers]
        parts = list(_waves(events.data, at, stop, shape, wave_rows_min))
    begin, end, place = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(begin, kind="stable")
    return Images(begin[order], end[order], rows.numbers[place[order]])


_Wave = tuple[Offsets, Offsets, Offsets]


def _waves(
    data: Bytes, at: Offsets, stop: Offsets, shape: Shape, wave_rows_min: int
) -> Iterator[_Wave]:
    yield at[:0], at[:0], at[:0]
    going = np.flatnonzero(at < stop)
    at = at.copy()
    while len(going) >= wave_rows_min:
        begin = at[going]
        end = shape.ends(data, begin)
        # Each wave must get ahead in every event, or a damaged length would loop for ever.
        if not bool(((begin < end) & (end <= stop[going])).all()):
            raise CorruptError(_TOO_LONG)
        yield begin, end, going
        at[going] = end
        going = going[end < stop[going]]
    if len(going):
        yield _one_by_one(data, at, stop, shape, going)


def _one_by_one(data: Bytes, at: Offsets, stop: Offsets, shape: Shape, going: Offsets) -> _Wave:
    view, step = data.u8s.data, shape.step
    images_by_event = [
        list(_of_event(view, step, *each))
        for each in zip(at[going].tolist(), stop[going].tolist(), strict=True)
    ]
    bounds = np.array(list(itertools.chain.from_iterable(images_by_event)), np.int64).reshape(-1, 2)
    return bounds[:, 0], bounds[:, 1], np.repeat(going, [len(images) for images in images_by_event])


def _of_event(
    view: memoryview, step: Callable[[memoryview, int], int], begin: int, stop: int
) -> Iterator[tuple[int, int]]:
    while begin < stop:
        end = step(view, begin)
        if not begin < end <= stop:
            raise CorruptError(_TOO_LONG)
        yield begin, end
        begin = end


def _first_images(events: Events, rows: TableRows) -> Offsets:
    """Return where the first image of each event begins; each image must have all columns of the
    table.
    """
    data, columns = events.data, len(rows.table.columns)
    at = events.begin[rows.numbers] + (HEADER_BYTES + _V1_HEAD_BYTES)
    types = events.types[rows.numbers]
    v2 = _IS_V2[types]
    if bool(v2.any()):
        at = at + np.where(v2, data.number(at, 2), 0)
    if not bool(
        (data.matrix(at, len(_packed(columns))) == np.frombuffer(_packed(columns), np.uint8)).all()
    ):
        raise CorruptError(
            f"a row event of {rows.table.name} has another number of columns than its TABLE_MAP"
        )
    at = _after_bitmap(data, at + len(_packed(columns)), rows)
    updates = _IS_UPDATE[types]
    if bool(updates.any()):
        at[updates] = _after_bitmap(data, at[updates], rows)
    if bool((at > events.end[rows.numbers]).any()):
        raise CorruptError(f"a row event of {rows.table.name} ends within its header")
    return at


def _after_bitmap(data: Bytes, at: Offsets, rows: TableRows) -> Offsets:
    """Behind the bitmaps of the columns present, which must be all;
    bits beyond them have no meaning.
    """
    columns = rows.table.columns
    size = (len(columns) + 7) // 8
    whole = np.frombuffer(((1 << len(columns)) - 1).to_bytes(size, "little"), np.uint8)
    present = data.matrix(at, size) & whole
    lacking = np.flatnonzero((present != whole).any(axis=1))
    if len(lacking):
        bits = np.unpackbits(present[lacking[0]], bitorder="little")[: len(columns)]
        names = [column.name for column, bit in zip(columns, bits, strict=True) if not bit]
        raise _without_columns(rows.table.name, names)
    return at + size


def _without_columns(table: str, names: Sequence[str]) -> RowImageError:
    missing = ", ".join(filter(None, names)) or "all columns"
    return RowImageError(
        f"the log holds row images of {table} without {missing}: SET GLOBAL "
        "binlog_row_image='FULL' on the server, in its sessions too, and begin the "
        "changefeed after that. MariaDB 11 leaves generated columns out of UPDATE and DELETE whatever "
        "its settings are: leave these columns out of the changefeed by --columns, or the table, or "
        "alter it so that it has none"
    )


def completed(events: Events, rows: TableRows, shape: Shape, unread: Collection[int]) -> Events:
    """The events of `rows` alone, with images of all columns: columns that are `unread` by anybody
    may be lacking, and get any value.

    Raises:
        RowImageError: others are lacking.
        CorruptError: the events cannot be read.
    """
    with reading(f"a row event of {rows.table.name}"):
        return join_events(
            [
                events.header(number)
                + _completed(rows.table, events.types[number], events.body(number), shape, unread)
                for number in rows.numbers.tolist()
            ]
        )


def _completed(
    table: TableMap, kind: int, body: bytes, shape: Shape, unread: Collection[int]
) -> bytes:
    columns, at = len(table.columns), _V1_HEAD_BYTES
    at += int.from_bytes(body[at : at + 2], "little") if _IS_V2[kind] else 0
    at += len(_packed(columns))
    head, size = body[:at], (columns + 7) // 8
    parts: list[_PartOfRow] = []
    for _ in range(1 + int(_IS_UPDATE[kind])):
        part = _PartOfRow.of(body[at : at + size], shape)
        missing = set(range(columns)) - {*part.places, *unread}
        if missing:
            raise _without_columns(
                table.name, [table.columns[place].name for place in sorted(missing)]
            )
        parts.append(part)
        at += size
    images = [head, *[((1 << columns) - 1).to_bytes(size, "little")] * len(parts)]
    view = memoryview(body)
    for part in itertools.cycle(parts):
        if at == len(body):
            return b"".join(images)
        end = part.shape.step(view, at)
        if not at < end <= len(body):
            raise CorruptError(_TOO_LONG)
        images.append(part.completed(body[at:end], shape))
        at = end
    raise AssertionError("an event has one image at least")


@dataclass(frozen=True, slots=True)
class _PartOfRow:
    """The columns that the images of an event have."""

    places: tuple[int, ...]
    shape: Shape

    @classmethod
    def of(cls, present: bytes, whole: Shape) -> "_PartOfRow":
        bits = int.from_bytes(present, "little")
        places = tuple(place for place in range(len(whole.columns)) if bits >> place & 1)
        return cls(places, Shape(tuple(whole.columns[place] for place in places)))

    def completed(self, image: bytes, whole: Shape) -> bytes:
        """An image of these columns as one of all columns."""
        at = self.shape.bitmap_bytes
        nulls = int.from_bytes(image[:at], "little")
        cells: dict[int, bytes] = {}
        for number, place in enumerate(self.places):
            if not nulls >> number & 1:
                size, before, _ = whole.columns[place]
                end = at + before
                end += int.from_bytes(image[at:end], "little") if before else size
                cells[place] = image[at:end]
                at = end
        # A column that cannot be null has no bit of its own.
        cells |= {
            place: bytes(before or size)
            for place, (size, before, nullable) in enumerate(whole.columns)
            if not nullable and place not in self.places
        }
        bits = sum(1 << place for place in range(len(whole.columns)) if place not in cells)
        bitmap = bits.to_bytes(whole.bitmap_bytes, "little")
        return b"".join([bitmap, *(cells[place] for place in sorted(cells))])


def _packed(number: int) -> bytes:
    return bytes((number,)) if number < 251 else b"\xfc" + number.to_bytes(2, "little")


def _table_ids(events: Events, numbers: Offsets) -> npt.NDArray[np.int64]:
    ids: npt.NDArray[np.int64] = events.data.number(
        events.begin[numbers] + HEADER_BYTES, ID_BYTES
    ).astype(np.int64)
    return ids


def _differs(events: Events, numbers: Offsets) -> Mask:
    """Which events after the first have another body than the one before."""
    begin, end = events.begin[numbers] + HEADER_BYTES, events.end[numbers]
    size = end - begin
    differs: Mask = size[1:] != size[:-1]
    if bool(differs.any()):
        bodies = [events.body(number) for number in numbers.tolist()]
        return np.array([one != other for one, other in itertools.pairwise(bodies)])
    for word in range(0, int(size[0]), 8):
        left = min(8, int(size[0]) - word)
        words = events.data.u64(begin + word) & np.uint64(
            (1 << 8 * left) - 1 if left < 8 else 0xFFFFFFFFFFFFFFFF
        )
        differs |= words[1:] != words[:-1]
    return differs
