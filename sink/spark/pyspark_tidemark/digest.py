"""Digests of a table's rows, equal wherever a row comes from: what `tidemark cli verify` compares.

Pure.

A row is its key and its columns as JSON text (`json_text`), columns in the order of their names. A
digest is the first 64 bits of BLAKE2b. Rows are gathered by ranges of key digests, which
share their first bits; a range has a count, the size of its rows' text, and a sum of their digests
modulo 2^64: checksums of parts of a table can be added up.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.json_text import objects

COARSE_BITS = 14
"""Of the division of all keys."""
_BITS = 64


def key_texts(rows: Any, key: Sequence[str]) -> Any:
    """The keys of a RecordBatch, one JSON object a row."""
    return objects(key, [rows[name] for name in key])


def row_texts(rows: Any) -> Any:
    """The rows of a RecordBatch, one JSON object a row."""
    names = sorted(rows.schema.names)
    return objects(names, [rows[name] for name in names])


def digests(texts: Any) -> Any:
    """A NumPy array of 64-bit digests; hashing one text takes no longer than arithmetic on columns
    of bytes would.
    """
    parts = [
        hashlib.blake2b(text, digest_size=_BITS // 8).digest()
        for text in texts.cast("binary").to_pylist()
    ]
    return np.frombuffer(b"".join(parts), ">u8").astype(np.uint64)


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Ranges of key digests: all, divided by their first bits, or some of these,
    each divided by its next bits.
    """

    bits: int = COARSE_BITS
    within: tuple[int, ...] = ()
    """The numbers, ascending, of the coarse ranges that are divided once more; empty:
    all keys are divided.
    """

    def __len__(self) -> int:
        return max(len(self.within), 1) << self.bits

    def of(self, keys: Any) -> Any:
        """The number of each key digest's range; -1 for those outside."""
        if not self.within:
            return (keys >> np.uint64(_BITS - self.bits)).astype(np.int64)
        coarse = (keys >> np.uint64(_BITS - COARSE_BITS)).astype(np.int64)
        chosen = np.array(self.within, np.int64)
        place = np.minimum(np.searchsorted(chosen, coarse), len(chosen) - 1)
        next_bits = (
            keys << np.uint64(COARSE_BITS) >> np.uint64(_BITS - self.bits)
            if self.bits
            else np.zeros_like(keys)
        )
        return np.where(
            chosen[place] == coarse, place << self.bits | next_bits.astype(np.int64), -1
        )


class RangeChecksums:
    """Count, size and sum of the rows in each of some ranges."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.counts = np.zeros(len(ranges), np.int64)
        self.sizes = np.zeros(len(ranges), np.int64)
        self.sums = np.zeros(len(ranges), np.uint64)

    def add(self, rows: Any, key: Sequence[str]) -> None:
        """Take the rows of a RecordBatch."""
        if not rows.num_rows:
            return
        places = self.ranges.of(digests(key_texts(rows, key)))
        if self.ranges.within:
            rows, places = rows.filter(pa.array(places >= 0)), places[places >= 0]
        texts = row_texts(rows)
        np.add.at(self.counts, places, 1)
        np.add.at(self.sizes, places, np.asarray(pc.binary_length(texts)))
        np.add.at(self.sums, places, digests(texts))

    def merge(self, other: bytes) -> None:
        """Add the checksums of another part of the table, as `to_bytes` gave them."""
        counts, sizes, sums = np.frombuffer(other, np.uint64).reshape(3, -1)
        self.counts += counts.astype(np.int64)
        self.sizes += sizes.astype(np.int64)
        self.sums += sums

    def to_bytes(self) -> bytes:
        """Pack all counts, sizes and sums for `merge`."""
        return np.concatenate(
            [self.counts.astype(np.uint64), self.sizes.astype(np.uint64), self.sums]
        ).tobytes()

    @property
    def rows(self) -> int:
        """How many rows were added."""
        return int(self.counts.sum())
