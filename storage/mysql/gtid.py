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

from storage.model.errors import InvalidError
from storage.mysql.buffer import Reader

_MARIADB = re.compile(r"(\d+)-(\d+)-(\d+)")
_TAG = re.compile(r"[A-Za-z_]\w{0,31}")
_U64 = struct.Struct("<Q")
_TAGGED = 1
_FORMAT_SHIFT = 56
_TAGGED_COUNT = (1 << _FORMAT_SHIFT) - 1
Source: TypeAlias = tuple[uuid.UUID, str]
"""The server that ran transactions first, and the tag it gave their GTIDs; mostly none."""


@dataclass(frozen=True, slots=True)
class MariaGtidSet:
    """For each replication domain (server, seq) of the last transaction read."""

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
            domain, server, seq = map(int, match.groups())
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
    """For each source the inclusive intervals read, ascending, with gaps between them."""

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
                try:
                    first, _, last = each.partition("-")
                    pair, source = (int(first), int(last or first)), (uuid.UUID(server), tag)
                except ValueError as err:
                    raise InvalidError(
                        f"{part!r} is not a set of MySQL's GTIDs, like uuid:1-5:tag:1-2"
                    ) from err
                if not 1 <= pair[0] <= pair[1]:
                    raise InvalidError(f"{part!r} holds an empty interval")
                intervals.setdefault(source, []).append(pair)
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
            tag = reader.take(reader.varied()).decode(errors="replace") if tagged else ""
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
        """Whether it holds each transaction of `other`."""
        return all(
            any(low <= first and last <= high for low, high in self.intervals.get(source, ()))
            for source, intervals in other.intervals.items()
            for first, last in intervals
        )

    def holds(self, server: uuid.UUID, gno: int, tag: str = "") -> bool:
        """Whether that transaction was read."""
        return any(first <= gno <= last for first, last in self.intervals.get((server, tag), ()))

    def encode(self) -> bytes:
        """As COM_BINLOG_DUMP_GTID sends it; with tags in the form of MySQL 8.3,
        which older servers do not read.

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
