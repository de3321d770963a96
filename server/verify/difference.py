"""Differences between two sides of a table: first the ranges of keys, then the rows in them. Pure.

A binary search over key ranges would scan both sides log n times. Here one scan of each side gives
the sums of 2^14 ranges, which answers every question of such a search at once; where these hold too
many rows to be looked at, a second scan divides those that differ into up to 2^20. A last scan
brings the rows of ranges that differ.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyspark_tidemark.digest import COARSE_BITS, RangeChecksums, Ranges

ONLY_UPSTREAM, ONLY_LAKE, DIFFERS, TWICE = (
    "only upstream",
    "only in the lake",
    "differs",
    "more than once in the lake",
)
_FINE_BITS: Final = 20
_NEXT_BITS_MAX: Final = 64 - COARSE_BITS - 1


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit of rows and bytes of differing ranges to compare row by row in one run, since both
    sides are in memory.
    """

    rows: int = 200_000
    bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class DifferingKey:
    """One key whose rows are not the same; rows and key are JSON text."""

    key: str
    kind: str
    upstream: str | None
    lake: str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A `DifferingKey` with values, for people."""

    key: dict[str, Any]
    kind: str
    columns: tuple[str, ...] = ()
    """The columns that differ, for a row that both sides have."""
    upstream: dict[str, Any] | None = None
    lake: dict[str, Any] | None = None

    @classmethod
    def of(cls, pair: DifferingKey) -> "Difference":
        """Read the texts."""
        upstream = None if pair.upstream is None else json.loads(pair.upstream)
        lake = None if pair.lake is None else json.loads(pair.lake)

        columns: tuple[str, ...] = ()
        if upstream is not None and lake is not None:
            columns = tuple(name for name in upstream if upstream[name] != lake.get(name))
        return cls(json.loads(pair.key), pair.kind, columns, upstream, lake)

    def to_document(self) -> dict[str, Any]:
        """Members for JSON."""
        return {
            "key": self.key,
            "kind": self.kind,
            "columns": list(self.columns),
            "upstream": self.upstream,
            "lake": self.lake,
        }


def differing(upstream: RangeChecksums, lake: RangeChecksums) -> list[int]:
    """The ranges whose count or sum is not the same on both sides."""
    differs = (upstream.counts != lake.counts) | (upstream.sums != lake.sums)
    return [int(place) for place in np.flatnonzero(differs)]


def divided(coarse: Sequence[int]) -> Ranges:
    """The coarse ranges that differ, as finely as memory for the sums allows."""
    # All of them together are at most 2^20: the fewer coarse ranges differ, the finer each is
    # divided.
    bits = min(_FINE_BITS - (len(coarse) - 1).bit_length(), _NEXT_BITS_MAX)
    return Ranges(bits, tuple(coarse))


def affordable(
    differing_ranges: Sequence[int], upstream: RangeChecksums, lake: RangeChecksums, budget: Budget
) -> list[int]:
    """Return as many of the ranges as fit into the budget on either side, the smallest first; maybe
    none.
    """
    places = np.array(differing_ranges, np.int64)
    rows = np.maximum(upstream.counts, lake.counts)[places]
    size = np.maximum(upstream.sizes, lake.sizes)[places]
    order = np.lexsort((rows, size))
    fits = (np.cumsum(rows[order]) <= budget.rows) & (np.cumsum(size[order]) <= budget.bytes)
    return sorted(int(place) for place in places[order][fits])


def differences(
    upstream: Iterable[tuple[str, str]], lake: Iterable[tuple[str, str]]
) -> Iterator[DifferingKey]:
    """Compare rows as JSON text by their keys' text; the lake may have a key more than once."""
    ours = dict(upstream)
    theirs: dict[str, list[str]] = {}
    for key, row in lake:
        theirs.setdefault(key, []).append(row)
    for key in sorted(ours.keys() | theirs.keys()):
        upstream_row, lake_rows = ours.get(key), theirs.get(key, [])
        if lake_rows == [upstream_row]:
            continue
        yield DifferingKey(
            key, _kind(upstream_row, lake_rows), upstream_row, lake_rows[0] if lake_rows else None
        )


def _kind(upstream_row: str | None, lake_rows: Sequence[str]) -> str:
    if len(lake_rows) > 1:
        return TWICE
    if upstream_row is None:
        return ONLY_LAKE
    return DIFFERS if lake_rows else ONLY_UPSTREAM
