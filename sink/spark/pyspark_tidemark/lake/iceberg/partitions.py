"""Partitions of Iceberg tables: which one a row belongs to, by the transforms of the table's
partition spec (Iceberg's specification, "Partition Transforms"), computed with Arrow and NumPy, as
tasks have no Java.

Values are kept as Iceberg writes a single value in JSON, by the spec's field ids; the JVM reads
them back with the types that the table has. Pure.

Invariant: a file has rows of one partition only. An engine leaves out files by their partition, so
a row under another one would be invisible to some queries, and not to others.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Context, Decimal
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.partition_columns import grouped

_WITH_WIDTH: Final = re.compile(r"(bucket|truncate)\[([0-9]+)\]")
_UNITS: Final = {"year": "Y", "month": "M", "day": "D", "hour": "h"}
IDENTITY: Final = "identity"
_PLAIN: Final = (IDENTITY, "void", *_UNITS)
_POSITIVE: Final = 0x7FFFFFFF
_DIGITS: Final = 38
"""A decimal has so many at most; the least ones get one more where they are truncated."""
_EXACT: Final = Context(prec=_DIGITS + 1)
"""Python's own context rounds to 28 digits."""


class Partition(NamedTuple):
    """The partition that a file belongs to."""

    spec: int
    """The id of the partition spec that the file was written under."""
    values: str
    """JSON, by field id; that of an unpartitioned spec is an empty list."""


UNPARTITIONED: Final = Partition(0, "[]")
"""Of every file of a table that never was partitioned."""


@dataclass(frozen=True)
class SpecField:
    """One field of a partition spec."""

    number: str
    """Its field id."""
    name: str
    source: int
    """The field id of its column."""
    transform: str
    """As Iceberg writes it, `bucket[16]`."""


@dataclass(frozen=True)
class Partitioning:
    """A partition spec; pickled into tasks."""

    spec: int = 0
    fields: tuple[SpecField, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Partitioning":
        """Read Iceberg's JSON of a spec.

        Raises:
            SourceError: ErrPartitionUnsupported, it has a transform that is not known here.
        """
        described = json.loads(text)
        return cls(int(described["spec-id"]), tuple(map(_field, described["fields"])))

    def split(self, rows: Any, columns: Mapping[int, str]) -> Iterator[tuple[Partition, Any]]:
        """The rows (pyarrow.Table) of each partition, in their order; `columns` are the names of
        the columns by field id.
        """
        if not self.fields or not len(rows):
            yield Partition(self.spec, "[]"), rows
            return
        values = [transformed(of.transform, rows[columns[of.source]]) for of in self.fields]
        for first, part in grouped(rows, values):
            described = {
                of.number: _json_value(column[first])
                for of, column in zip(self.fields, values, strict=True)
            }
            yield Partition(self.spec, json.dumps(described)), part


def _field(described: Mapping[str, Any]) -> SpecField:
    transform = str(described["transform"])
    if not is_known(transform) or "source-id" not in described:
        raise SourceError(
            "ErrPartitionUnsupported",
            f"somebody else has partitioned the table by {described['name']}, {transform!r}, which "
            "is no transform that is known here: drop this partition field",
        )
    return SpecField(
        str(described["field-id"]), described["name"], int(described["source-id"]), transform
    )


def is_known(transform: str) -> bool:
    """Whether a transform can be computed here, of columns of some types."""
    return transform in _PLAIN or _WITH_WIDTH.fullmatch(transform) is not None


def transformed(transform: str, column: Any) -> Any:
    """The partition values of a column (pyarrow.Array), nulls where it has nulls.

    Raises:
        SourceError: ErrPartitionUnsupported, a column of this type has none.
    """
    # Few values are different in most columns by which tables are partitioned.
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = pc.dictionary_encode(whole)
    return _of_values(transform, encoded.dictionary).take(encoded.indices)


def _of_values(transform: str, values: Any) -> Any:
    """The same of an array without nulls."""
    if transform == "void":
        return pa.nulls(len(values), pa.int32())
    if transform == IDENTITY:
        if pa.types.is_floating(values.type):
            raise _unsupported(transform, values.type)
        return values
    if transform in _UNITS:
        return _times(transform, values)
    match = _WITH_WIDTH.fullmatch(transform)
    assert match is not None, transform
    return (_buckets if match[1] == "bucket" else _truncated)(values, int(match[2]))


def _times(transform: str, values: Any) -> Any:
    kind = values.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise _unsupported(transform, kind)
    unit = "D" if pa.types.is_date(kind) else "us"
    times = _integers(values).astype(f"datetime64[{unit}]")
    since_1970 = times.astype(f"datetime64[{_UNITS[transform]}]").astype(np.int64)
    units = pa.array(since_1970.astype(np.int32))
    return units.view(pa.date32()) if transform == "day" else units


def _integers(values: Any) -> Any:
    """Integers, days or microseconds as NumPy's int64."""
    if pa.types.is_date(values.type):
        values = values.view(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.view(pa.int64())
    return values.to_numpy(zero_copy_only=False).astype(np.int64)


def _truncated(values: Any, width: int) -> Any:
    kind = values.type
    if pa.types.is_integer(kind):
        numbers = _integers(values)
        return pa.array(numbers - np.mod(numbers, width)).cast(kind, safe=False)
    if pa.types.is_decimal(kind):
        numbers = [_unscaled(value, kind.scale) for value in values.to_pylist()]
        cut = [Decimal(number - number % width).scaleb(-kind.scale, _EXACT) for number in numbers]
        return pa.array(cut, pa.decimal256(_DIGITS + 1, kind.scale))
    if pa.types.is_string(kind):
        return pc.utf8_slice_codeunits(values, 0, width)
    if pa.types.is_binary(kind):
        return pc.binary_slice(values, 0, width)
    raise _unsupported(f"truncate[{width}]", kind)


def _unscaled(value: Decimal, scale: int) -> int:
    return int(value.scaleb(scale, _EXACT))


def _buckets(values: Any, count: int) -> Any:
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        hashed = _hash_longs(_integers(values))
    elif pa.types.is_decimal(kind):
        texts = [_two_s_complement(_unscaled(each, kind.scale)) for each in values.to_pylist()]
        hashed = _hash_bytes(pa.array(texts, pa.binary()))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        hashed = _hash_bytes(values.cast(pa.binary()))
    else:
        raise _unsupported(f"bucket[{count}]", kind)
    return pa.array(((hashed & np.uint32(_POSITIVE)) % np.uint32(count)).astype(np.int32))


def _two_s_complement(number: int) -> bytes:
    """In the fewest bytes, as Java's BigInteger gives them."""
    bits = (~number if number < 0 else number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


# Murmur3 for x86 with 32 bits and the seed 0 (Iceberg's specification, "Appendix B").


def _hash_longs(numbers: Any) -> Any:
    halves = numbers.astype("<i8").view("<u4").reshape(-1, 2)
    state = np.zeros(len(numbers), np.uint32)
    for half in (halves[:, 0], halves[:, 1]):
        state = _mixed(state, half)
    return _finished(state, np.full(len(numbers), 8, np.uint32))


def _hash_bytes(values: Any) -> Any:
    """Of binary values, word by word for all of them at once."""
    if not len(values):
        return np.zeros(0, np.uint32)
    _, offsets_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offsets_buffer, "<i4")[values.offset :][: len(values) + 1]
    begins, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    # A word may be read beyond the last value; what is beyond is not used.
    data = np.zeros(int(offsets[-1]) + 4, np.uint8)
    if data_buffer is not None:
        data[: int(offsets[-1])] = np.frombuffer(data_buffer, np.uint8)[: int(offsets[-1])]
    state, words = np.zeros(len(values), np.uint32), lengths // 4
    for number in range(int(words.max(initial=0))):
        has_word = np.flatnonzero(words > number)
        word = _word(data, begins[has_word] + 4 * number)
        state[has_word] = _mixed(state[has_word], word)
    rest = (lengths % 4).astype(np.uint32)
    tails = np.flatnonzero(rest)
    last = _word(data, begins[tails] + 4 * words[tails].astype(np.int64))
    last &= (np.uint32(1) << (np.uint32(8) * rest[tails])) - np.uint32(1)
    state[tails] ^= _scrambled(last)
    return _finished(state, lengths.astype(np.uint32))


def _word(data: Any, places: Any) -> Any:
    four = data[places[:, None] + np.arange(4)].astype(np.uint32)
    return four[:, 0] | four[:, 1] << 8 | four[:, 2] << 16 | four[:, 3] << 24


def _rotated(words: Any, bits: int) -> Any:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def _scrambled(words: Any) -> Any:
    return _rotated(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _mixed(state: Any, words: Any) -> Any:
    return _rotated(state ^ _scrambled(words), 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finished(state: Any, lengths: Any) -> Any:
    state = state ^ lengths
    state = (state ^ state >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    state = (state ^ state >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return state ^ state >> np.uint32(16)


def _json_value(scalar: Any) -> Any:
    """A value as Iceberg's `SingleValueParser` reads it."""
    value = scalar.as_py()
    for kind, written in _WRITTEN.items():
        if isinstance(value, kind):
            return written(value)
    return value


_WRITTEN: Final[Mapping[type, Callable[[Any], Any]]] = {
    datetime: lambda value: value.isoformat(timespec="microseconds"),
    date: lambda value: value.isoformat(),
    Decimal: lambda value: format(value, "f"),
    bytes: lambda value: value.hex().upper(),
}
"""A datetime is a date, too, so it stands before that."""


def _unsupported(transform: str, kind: Any) -> SourceError:
    return SourceError(
        "ErrPartitionUnsupported",
        f"somebody else has partitioned the table by {transform} of a column of type {kind}, which "
        "cannot be written here: drop this partition field",
    )
