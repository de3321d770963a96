"""Sets of global transaction ids: what was read of a log, as the servers write it and as they are asked for more.

MariaDB   `domain-server-seq,…`         the last one of each domain; all before it in the domain are meant, too
MySQL     `uuid[:tag]:first-last:…,…`   intervals of each server
"""

import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from storage.model.errors import InvalidError

_MARIADB = re.compile(r"(\d+)-(\d+)-(\d+)")
_U64 = struct.Struct("<Q")


class GtidSet(Protocol):
    """What was read; immutable, its text is canonical."""

    def contains(self, other: Self) -> bool:
        """Whether it holds everything that `other` does."""
        ...


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
        return ",".join(f"{domain}-{server}-{seq}" for domain, (server, seq) in sorted(self.positions.items()))


@dataclass(frozen=True, slots=True)
class MysqlGtidSet:
    """For each server the inclusive intervals read, ascending, with gaps between them."""

    intervals: Mapping[uuid.UUID, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "MysqlGtidSet":
        """Read `uuid:1-5:7,uuid:1-9`.

        Raises:
            InvalidError: it has another form, or tags (MySQL 8.3's), which are not read.
        """
        found: dict[uuid.UUID, list[tuple[int, int]]] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            server, *intervals = part.split(":")
            try:
                pairs = [
                    (int(first), int(last or first)) for first, _, last in (each.partition("-") for each in intervals)
                ]
                found.setdefault(uuid.UUID(server), []).extend(pairs)
            except ValueError as err:
                raise InvalidError(f"{part!r} is not a set of MySQL's GTIDs without tags, like uuid:1-5") from err
            if any(not 1 <= first <= last for first, last in pairs):
                raise InvalidError(f"{part!r} holds an empty interval")
        return cls({server: _merged(pairs) for server, pairs in found.items()})

    def add(self, server: uuid.UUID, gno: int) -> "MysqlGtidSet":
        """With one more transaction."""
        mine = self.intervals.get(server, ())
        if mine and mine[-1][1] == gno - 1:
            return MysqlGtidSet({**self.intervals, server: (*mine[:-1], (mine[-1][0], gno))})
        return MysqlGtidSet({**self.intervals, server: _merged([*mine, (gno, gno)])})

    def contains(self, other: "MysqlGtidSet") -> bool:
        """Whether it holds each transaction of `other`."""
        return all(
            any(low <= first and last <= high for low, high in self.intervals.get(server, ()))
            for server, intervals in other.intervals.items()
            for first, last in intervals
        )

    def holds(self, server: uuid.UUID, gno: int) -> bool:
        """Whether that transaction was read."""
        return any(first <= gno <= last for first, last in self.intervals.get(server, ()))

    def encode(self) -> bytes:
        """As COM_BINLOG_DUMP_GTID sends it: `servers u64, (uuid, intervals u64, (first u64, after_last u64)*)*`."""
        parts = [_U64.pack(len(self.intervals))]
        for server, intervals in sorted(self.intervals.items()):
            parts += [server.bytes, _U64.pack(len(intervals))]
            parts += [_U64.pack(first) + _U64.pack(last + 1) for first, last in intervals]
        return b"".join(parts)

    def __str__(self) -> str:
        return ",".join(
            f"{server}:" + ":".join(f"{first}-{last}" if last > first else f"{first}" for first, last in intervals)
            for server, intervals in sorted(self.intervals.items())
        )


def _merged(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
