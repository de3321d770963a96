"""Sets of global transaction ids: what was read of a log,
as the servers write it and as they are asked for more.

MariaDB  `domain-server-seq,…`        the last one of each domain, which stands for all before it
MySQL    `uuid[:tag]:first-last:…,…`  intervals of each server and tag (8.3)
"""

import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from storage.model.errors import CorruptError, InvalidError
from storage.mysql.buffer import Reader

_MARIADB = re.compile(r"(\d{1,10})-(\d{1,10})-(\d{1,20})", re.ASCII)
_MARIADB_MAX = ((1 << 32) - 1, (1 << 32) - 1, (1 << 64) - 1)
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.I)
_TAG = re.compile(r"[a-z_]\w{0,31}", re.I | re.ASCII)
_INTERVAL = re.compile(r"(\d{1,19})(?:-(\d{1,19}))?", re.ASCII)
_GNO_MAX = (1 << 63) - 2
_U64 = struct.Struct("<Q")
_TAGGED = 1
_FORMAT_SHIFT = 56
_TAGGED_COUNT = (1 << _FORMAT_SHIFT) - 1
Source: TypeAlias = tuple[uuid.UUID, str]
"""The server that ran transactions first, and the tag it gave their GTIDs; mostly none."""


@dataclass(frozen=True, slots=True)
class MariaGtidSet:
    """MariaDB's set of GTIDs: for each replication domain the (server, seq) of the last transaction
    read.
    """

    positions: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MariaGtidSet":
        """Read `0-1-41,1-2-5`.

        Raises:
            InvalidError: it has another form.
        """
        positions: dict[int, tuple[int, int]] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            match = _MARIADB.fullmatch(part)
            if match is None:
                raise InvalidError(f"{part!r} is not a GTID of MariaDB, like 0-1-41")
            domain, server, seq = numbers = tuple(map(int, match.groups()))
            if any(number > most for number, most in zip(numbers, _MARIADB_MAX, strict=True)):
                raise InvalidError(f"{part!r} has a number that MariaDB does not give a GTID")
            if domain not in positions or positions[domain][1] < seq:
                positions[domain] = (server, seq)
        return cls(positions)

    def add(self, domain: int, server: int, seq: int) -> "MariaGtidSet":
        """With that transaction, the last one read of its domain."""
        return MariaGtidSet({**self.positions, domain: (server, seq)})

    def contains(self, other: "MariaGtidSet") -> bool:
        """Whether it is at least as far in each domain of `other`."""
        return all(
            domain in self.positions and self.positions[domain][1] >= seq
            for domain, (_, seq) in other.positions.items()
        )

    def holds(self, domain: int, seq: int) -> bool:
        """Whether that transaction was read."""
        return domain in self.positions and self.positions[domain][1] >= seq

    def __str__(self) -> str:
        return ",".join(
            f"{domain}-{server}-{seq}" for domain, (server, seq) in sorted(self.positions.items())
        )


@dataclass(frozen=True, slots=True)
class MysqlGtidSet:
    """MySQL's set of GTIDs: for each source the inclusive intervals read, ascending and with gaps
    between them.
    """

    intervals: Mapping[Source, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MysqlGtidSet":
        """Read `uuid:1-5:7:blue:1-2,uuid:1-9`; a tag counts for the intervals behind it.

        Raises:
            InvalidError: it has another form.
        """
        intervals: dict[Source, list[tuple[int, int]]] = {}
        for part in filter(None, ("".join(part.split()) for part in text.split(","))):
            server, *rest = part.split(":")
            tag = ""
            for each in rest:
                if _TAG.fullmatch(each):
                    tag = each.lower()
                    continue
                match = _INTERVAL.fullmatch(each)
                if match is None or _UUID.fullmatch(server) is None:
                    raise InvalidError(
                        f"{part!r} is not a set of MySQL's GTIDs, like uuid:1-5:tag:1-2"
                    )
                pair = int(match[1]), int(match[2] or match[1])
                if not 1 <= pair[0] <= pair[1]:
                    raise InvalidError(f"{part!r} holds an empty interval")
                if pair[1] > _GNO_MAX:
                    raise InvalidError(f"{part!r} is beyond {_GNO_MAX}, the last GTID of a source")
                intervals.setdefault((uuid.UUID(server), tag), []).append(pair)
        return cls({source: _merged(pairs) for source, pairs in intervals.items()})

    @classmethod
    def decode(cls, data: bytes) -> "MysqlGtidSet":
        """Read what `encode` wrote, as a PREVIOUS_GTIDS event has it.

        Raises:
            CorruptError: it is something else.
        """
        reader = Reader(data)
        head = reader.number(8)
        # With tags the first number's last byte says so, and the count stands in the middle.
        tagged = head >> _FORMAT_SHIFT == _TAGGED
        intervals: dict[Source, tuple[tuple[int, int], ...]] = {}
        for _ in range((head & _TAGGED_COUNT) >> 8 if tagged else head):
            server = uuid.UUID(bytes=reader.take(16))
            tag = read_tag(reader.take(reader.varied())) if tagged else ""
            # The servers write the end of an interval exclusive, but print it inclusive.
            pairs = [(reader.number(8), reader.number(8) - 1) for _ in range(reader.number(8))]
            intervals[server, tag] = _merged(pairs)
        return cls(intervals)

    def add(self, server: uuid.UUID, gno: int, tag: str = "", *, first: int = 0) -> "MysqlGtidSet":
        """With one more transaction, or with all from `first` to it."""
        mine, first = self.intervals.get((server, tag), ()), first or gno
        # Nearly always the next number: the last interval grows, and nothing is merged.
        if mine and mine[-1][1] == first - 1:
            return MysqlGtidSet({**self.intervals, (server, tag): (*mine[:-1], (mine[-1][0], gno))})
        return MysqlGtidSet({**self.intervals, (server, tag): _merged([*mine, (first, gno)])})

    def contains(self, other: "MysqlGtidSet") -> bool:
        """Whether it contains each transaction of `other`."""
        return all(
            any(low <= first and last <= high for low, high in self.intervals.get(source, ()))
            for source, intervals in other.intervals.items()
            for first, last in intervals
        )

    def holds(self, server: uuid.UUID, gno: int, tag: str = "") -> bool:
        """Whether that transaction was read."""
        return any(first <= gno <= last for first, last in self.intervals.get((server, tag), ()))

    def encode(self) -> bytes:
        """Encode the set for COM_BINLOG_DUMP_GTID; with tags in the format of MySQL 8.3, which
        older servers do not read.

        untagged   sources u64, (uuid, intervals)*
        tagged     1 u8, sources u48, 1 u8, (uuid, size of tag varied, tag, intervals)*
        intervals  count u64, (first u64, after_last u64)*
        """
        tagged = any(tag for _, tag in self.intervals)
        count = len(self.intervals)
        parts = [_U64.pack(_TAGGED << _FORMAT_SHIFT | count << 8 | _TAGGED if tagged else count)]
        for (server, tag), intervals in sorted(self.intervals.items()):
            parts += [server.bytes, bytes((2 * len(tag),)) + tag.encode() if tagged else b""]
            parts += [_U64.pack(len(intervals))]
            parts += [_U64.pack(first) + _U64.pack(last + 1) for first, last in intervals]
        return b"".join(parts)

    def __str__(self) -> str:
        parts: dict[uuid.UUID, list[str]] = {}
        for (server, tag), intervals in sorted(self.intervals.items()):
            parts.setdefault(server, [str(server)]).extend(
                [*filter(None, (tag,)), *map(_interval, intervals)]
            )
        return ",".join(":".join(each) for each in parts.values())


def read_tag(data: bytes) -> str:
    """The text of a GTID's tag, empty for none.

    Raises:
        CorruptError: it is no tag.
    """
    text = data.decode("latin-1")
    if text and _TAG.fullmatch(text) is None:
        raise CorruptError(f"{text!r} is not the tag of a GTID")
    return text


def _interval(pair: tuple[int, int]) -> str:
    first, last = pair
    return f"{first}-{last}" if last > first else f"{first}"


def _merged(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
