"""Hypothesis strategies: columns of every type, and values they can hold."""

import json
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st

from storage.tidb.cell import Value
from storage.tidb.field_type import NO_FLAGS, Flag, Type
from storage.tidb.schema import Column
from storage.tidb.time import CoreTime

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BITS = {Type.TINY: 8, Type.SHORT: 16, Type.INT24: 24, Type.LONG: 32, Type.LONGLONG: 64}
ELEMS = ("red", "green", "blue", "näh")


def _integer(kind: Type, *, unsigned: bool) -> tuple[Column, st.SearchStrategy[Any]]:
    flags = Flag.UNSIGNED if unsigned else NO_FLAGS
    low, high = (
        (0, (1 << BITS[kind]) - 1)
        if unsigned
        else (-(1 << BITS[kind] - 1), (1 << BITS[kind] - 1) - 1)
    )
    return Column(
        name=f"{kind.name.lower()}{'_u' if unsigned else ''}", type=kind, flags=flags
    ), st.integers(low, high)


def _decimal(precision: int, scale: int) -> tuple[Column, st.SearchStrategy[Any]]:
    column = Column(
        name=f"decimal_{precision}_{scale}", type=Type.NEWDECIMAL, flen=precision, decimal=scale
    )
    limit = 10**precision - 1
    return column, st.integers(-limit, limit).map(lambda digits: Decimal(f"{digits}e-{scale}"))


def _text(kind: Type, charset: str) -> tuple[Column, st.SearchStrategy[Any]]:
    column = Column(
        name=f"{kind.name.lower()}_{charset}", type=kind, charset=charset, collate=f"{charset}_bin"
    )
    return column, st.binary(max_size=12) if charset == "binary" else TEXT


CORE_TIMES = st.builds(
    CoreTime,
    st.integers(0, 9999),
    st.integers(0, 12),
    st.integers(0, 31),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999_999),
)
DATES = st.builds(CoreTime, st.integers(0, 9999), st.integers(0, 12), st.integers(0, 31))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON_DOCS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)

COLUMNS: tuple[tuple[Column, st.SearchStrategy[Any]], ...] = (
    *(_integer(kind, unsigned=unsigned) for kind in BITS for unsigned in (False, True)),
    *(
        _decimal(*shape)
        for shape in ((1, 0), (5, 5), (10, 2), (18, 9), (18, 0), (19, 4), (38, 10), (65, 30))
    ),
    *(
        _text(kind, charset)
        for kind in (Type.VARCHAR, Type.BLOB, Type.STRING)
        for charset in ("utf8mb4", "binary")
    ),
    (
        Column(name="f", type=Type.FLOAT),
        FLOATS.filter(lambda v: abs(v) < 3e38).map(lambda v: float(np.float32(v))),
    ),
    (Column(name="d", type=Type.DOUBLE), FLOATS),
    (Column(name="year", type=Type.YEAR, flags=Flag.UNSIGNED), st.integers(0, 2155)),
    (Column(name="date", type=Type.DATE, decimal=0), DATES),
    (Column(name="datetime", type=Type.DATETIME, decimal=6), CORE_TIMES),
    (Column(name="timestamp", type=Type.TIMESTAMP, decimal=6), CORE_TIMES),
    (
        Column(name="time", type=Type.TIME, decimal=6),
        st.integers(-3_020_399, 3_020_399).map(lambda s: s * 1_000_001_000),
    ),
    (
        Column(name="bit", type=Type.BIT, flen=10),
        st.integers(0, 1023).map(lambda n: n.to_bytes(2, "big")),
    ),
    (Column(name="enum", type=Type.ENUM, elems=ELEMS), st.sampled_from(["", *ELEMS])),
    (
        Column(name="set", type=Type.SET, elems=ELEMS),
        st.sets(st.sampled_from(ELEMS)).map(lambda names: ",".join(sorted(names, key=ELEMS.index))),
    ),
    (Column(name="json", type=Type.JSON), JSON_DOCS.map(json.dumps)),
)


def typed_values() -> st.SearchStrategy[tuple[Column, Value]]:
    """A column and a value of it."""
    return st.one_of(
        [values.map(lambda value, column=column: (column, value)) for column, values in COLUMNS]
    )
