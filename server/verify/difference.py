"""What differs between two sides of a table: first leaves, then the rows in them. Pure.

A binary search over key ranges would ask both sides log n times. Here one pass over each side gives the sums of all
leaves, which answers every question of such a search at once; a second pass brings the rows of leaves that differ.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark_tidemark.digest import Leaves

ONLY_UPSTREAM, ONLY_LAKE, DIFFERS, TWICE = "only upstream", "only in the lake", "differs", "more than once in the lake"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose rows are not the same."""

    key: dict[str, Any]
    kind: str
    columns: tuple[str, ...] = ()
    """Those that differ, of a row that both sides have."""
    upstream: dict[str, Any] | None = None
    lake: dict[str, Any] | None = None

    def to_document(self) -> dict[str, Any]:
        """Members for JSON."""
        return {
            "key": self.key,
            "kind": self.kind,
            "columns": list(self.columns),
            "upstream": self.upstream,
            "lake": self.lake,
        }


def differing_leaves(upstream: Leaves, lake: Leaves) -> list[int]:
    """The leaves whose count or sum is not the same on both sides."""
    found = (upstream.counts != lake.counts) | (upstream.sums != lake.sums)
    return [int(leaf) for leaf in np.flatnonzero(found)]


def affordable(leaves: Sequence[int], upstream: Leaves, lake: Leaves, max_rows: int) -> list[int]:
    """The first leaves with together about `max_rows` rows on the larger side, at least one."""
    sizes = np.maximum(upstream.counts, lake.counts)[list(leaves)]
    fitting = int(np.searchsorted(np.cumsum(sizes), max_rows, "right"))
    return list(leaves[: max(fitting, 1)])


def differences(upstream: dict[str, str], lake: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Difference]]:
    """Compare rows as JSON text by their keys' text; the lake may have a key more than once."""
    found: dict[str, list[str]] = {}
    for key, row in lake:
        found.setdefault(key, []).append(row)
    for key in sorted(upstream.keys() | found.keys()):
        ours, theirs = upstream.get(key), found.get(key, [])
        if theirs == [ours]:
            continue
        kind = TWICE if len(theirs) > 1 else ONLY_LAKE if ours is None else DIFFERS if theirs else ONLY_UPSTREAM
        yield key, _difference(key, kind, ours, theirs[0] if theirs else None)


def _difference(key: str, kind: str, ours: str | None, theirs: str | None) -> Difference:
    upstream, lake = (None if row is None else json.loads(row) for row in (ours, theirs))
    columns = () if upstream is None or lake is None else tuple(n for n in upstream if upstream[n] != lake.get(n))
    return Difference(json.loads(key), kind, columns, upstream, lake)
