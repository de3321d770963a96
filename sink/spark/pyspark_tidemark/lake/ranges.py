"""Which data files may hold which keys, by what a table's metadata says of the columns in each
file. Pure.

A bound that is not known bounds nothing, so the answer may be "may" for a file without the key, and
never "no" for one with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Bounds = Mapping[str, tuple[Any, Any]]
"""The lowest and the highest value in a file, of each column of which that is known,
both inclusive.
"""


def met(keys: Any, files: Sequence[Bounds]) -> list[bool]:
    """For each of the files whether it may hold one of `keys` (pyarrow.Table of the key's
    columns).
    """
    if not len(keys):
        return [False] * len(files)
    ends = _extent(keys)
    return [
        near(ends, bounds) and bool(pc.any(_inside(keys, bounds), min_count=0).as_py())
        for bounds in files
    ]


def possible(keys: Any, files: Iterable[Bounds], most: int) -> Any:
    """For each key whether one of the files may hold it (BooleanArray);
    all may when more than `most` files are near.
    """
    ends = _extent(keys)
    bounds_near = [bounds for bounds in files if near(ends, bounds)]
    if len(bounds_near) > most:
        return _all(keys, value=True)
    return reduce(
        pc.or_, (_inside(keys, bounds) for bounds in bounds_near), _all(keys, value=False)
    )


def near(extent: Bounds, bounds: Bounds) -> bool:
    """Whether a key within `extent` may be in the file."""
    shared = [(*extent[name], *bounds[name]) for name in bounds if name in extent]
    return not any(
        low > high_there or low_there > high for low, high, low_there, high_there in shared
    )


def any_near(
    key: Sequence[str], lows: Sequence[Any], highs: Sequence[Any], files: Iterable[Bounds]
) -> bool:
    """Whether one of the files may hold a key between `lows` and `highs`,
    a value for each column of the key.
    """
    pairs = zip(key, lows, highs, strict=True)
    ends = {name: (low, high) for name, low, high in pairs if isinstance(low, int | Decimal | str)}
    return any(near(ends, bounds) for bounds in files)


def extent(rows: Any, key: Sequence[str]) -> Bounds:
    """The bounds of rows themselves, of the key's columns that have an order."""
    return _extent(rows.select([name for name in key if _ordered(rows.schema.field(name).type)]))


def hull(one: Bounds, other: Bounds) -> Bounds:
    """The bounds of the rows of both; a column that only one of them names has no values in the
    other.
    """
    return {
        name: (min(end[0] for end in ends), max(end[1] for end in ends))
        for name in one.keys() | other.keys()
        if (ends := [bounds[name] for bounds in (one, other) if name in bounds])
    }


def coarser(files: Sequence[Bounds]) -> list[Bounds]:
    """Half as many bounds, neighbours joined: they hold at least what the old ones held."""
    if len({tuple(sorted(bounds)) for bounds in files}) != 1:
        # Bounds of different columns cannot be joined: one without bounds holds everything.
        return [{}]
    by_low = sorted(files, key=lambda bounds: [bounds[name][0] for name in sorted(bounds)])
    return [_joined(by_low[at : at + 2]) for at in range(0, len(by_low), 2)]


def _joined(files: Sequence[Bounds]) -> Bounds:
    return {
        name: (min(bounds[name][0] for bounds in files), max(bounds[name][1] for bounds in files))
        for name in files[0]
    }


def _ordered(kind: Any) -> bool:
    """The types whose values Python, Arrow and the formats order alike."""
    return bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_string(kind))


def _extent(keys: Any) -> Bounds:
    extremes = {
        name: pc.min_max(keys[name]).as_py()
        for name in keys.column_names
        if _ordered(keys.schema.field(name).type)
    }
    return {
        name: (ends["min"], ends["max"])
        for name, ends in extremes.items()
        if ends["min"] is not None
    }


def _inside(keys: Any, bounds: Bounds) -> Any:
    """For each key whether every column is within its bounds."""
    checks = [_all(keys, value=True)]
    for name, (low, high) in bounds.items():
        if name in keys.column_names and _ordered(kind := keys.schema.field(name).type):
            column = keys[name].combine_chunks()
            checks.append(pc.greater_equal(column, pa.scalar(low, kind)))
            checks.append(pc.less_equal(column, pa.scalar(high, kind)))
    return reduce(pc.and_, checks)


def _all(keys: Any, *, value: bool) -> Any:
    return pa.repeat(pa.scalar(value), len(keys))
