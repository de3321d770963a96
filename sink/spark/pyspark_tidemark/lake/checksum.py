"""A checksum of row changes that depends on the rows alone: not on their order, batches,
slices or readers. Pure.

Each row becomes text (every column's text or a mark for null, joined), the text a 64-bit number:
the polynomial of its bytes in an odd base modulo 2^64, mixed. The checksum is the sum of these
numbers, so parts can be added up.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.json_text import time_texts

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_SEPARATOR, _NULL = b"\x1f", b"\x00\x1e"
_CHUNK_ROWS = 8192
# of text; each byte is a few 64-bit numbers for a moment, which fit a core's caches
_CHUNK_BYTES = 1 << 17
_MASK = (1 << 64) - 1


def checksum(batches: Iterable[Any]) -> tuple[int, int]:
    """Rows and checksum of pyarrow RecordBatches or Tables of one schema."""
    rows, total = 0, 0
    for batch in batches:
        rows += len(batch)
        for start in range(0, len(batch), _CHUNK_ROWS):
            total += _sum(batch.slice(start, _CHUNK_ROWS))
    return rows, total & _MASK


def hexadecimal(total: int) -> str:
    """As it is written down: 16 digits."""
    return f"{total & _MASK:016x}"


def _sum(batch: Any) -> int:
    texts = pc.binary_join_element_wise(
        *[_text(column) for column in batch.columns], pa.scalar(_SEPARATOR, pa.binary()),
        null_handling="replace", null_replacement=_NULL,
    )  # fmt: skip
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return sum(
        int(np.add.reduce(_mixed(_polynomials(part)), dtype=np.uint64)) for part in _parts(texts)
    )


def _parts(texts: Any) -> Iterator[Any]:
    """All texts, in slices of at most `_CHUNK_BYTES` or of one text."""
    offsets, start = _offsets(texts), 0
    while start < len(texts):
        end = max(
            start + 1, int(np.searchsorted(offsets, offsets[start] + _CHUNK_BYTES, "right")) - 1
        )
        yield texts.slice(start, end - start)
        start = end


def _text(column: Any) -> Any:
    if pa.types.is_binary(column.type):
        return column
    texts = time_texts(column) if pa.types.is_timestamp(column.type) else column.cast(pa.string())
    return texts.cast(pa.binary())


def _polynomials(texts: Any) -> Any:
    """For each text the sum of (byte + 1) * base^position."""
    offsets = _offsets(texts)
    starts, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return np.zeros(len(texts), np.uint64)
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    # One more, where the last texts begin if they have no bytes.
    terms = np.zeros(len(raw) + 1, np.uint64)
    np.add(raw, np.uint64(1), out=terms[:-1])
    np.multiply(terms[:-1], _powers(_BASE, len(raw)), out=terms[:-1])
    # Not by running sums: each waits for the one before it, which takes ten times as long.
    sums = np.add.reduceat(terms, starts)
    sums[starts == ends] = 0  # numpy's sum of no terms is the term behind them
    return sums * _powers(_INVERSE, len(raw) + 1)[starts]


def _offsets(texts: Any) -> Any:
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    return offsets.astype(np.int64)


def _powers(base: Any, count: int) -> Any:
    """The first powers of a base; as many as a chunk needs are made once."""
    usual = _CHUNK_BYTES + 1
    return _kept_powers(base, usual)[:count] if count <= usual else _new_powers(base, count)


@functools.lru_cache(maxsize=2)
def _kept_powers(base: Any, count: int) -> Any:
    return _new_powers(base, count)


def _new_powers(base: Any, count: int) -> Any:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(values: Any) -> Any:
    """splitmix64's finalizer."""
    # Sums of unmixed polynomials would let changes of two rows cancel out.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
