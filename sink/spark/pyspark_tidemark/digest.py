"""Digests of a table's rows, equal wherever a row comes from: what `tidemark cli verify` compares. Pure.

A row is its key and its columns as JSON text (`json_text`), columns in the order of their names. A digest is the first
64 bits of BLAKE2b. Rows are gathered in leaves, the ranges of key digests that share their first bits; a leaf has a
count and a sum modulo 2^64, so leaves of parts of a table can be added up, and so can neighbours.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyspark_tidemark.json_text import objects

_BITS = 64


def key_texts(rows: Any, key: Sequence[str]) -> Any:
    """The keys of a RecordBatch, one JSON object a row."""
    return objects(key, [rows[name] for name in key])


def row_texts(rows: Any) -> Any:
    """The rows of a RecordBatch, one JSON object a row."""
    names = sorted(rows.schema.names)
    return objects(names, [rows[name] for name in names])


def digests(texts: Any) -> Any:
    """A NumPy array of 64-bit digests; hashing one text takes no longer than arithmetic on columns of bytes would."""
    parts = [hashlib.blake2b(text, digest_size=_BITS // 8).digest() for text in texts.cast("binary").to_pylist()]
    return np.frombuffer(b"".join(parts), ">u8").astype(np.uint64)


def leaf_of(keys: Any, bits: int) -> Any:
    """The leaf of each key digest, of 2^bits."""
    return (keys >> np.uint64(_BITS - bits)).astype(np.int64)


class Leaves:
    """Count and sum of each of 2^bits leaves."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.counts = np.zeros(1 << bits, np.int64)
        self.sums = np.zeros(1 << bits, np.uint64)

    def add(self, rows: Any, key: Sequence[str]) -> None:
        """Take the rows of a RecordBatch."""
        if not rows.num_rows:
            return
        leaves = leaf_of(digests(key_texts(rows, key)), self.bits)
        np.add.at(self.counts, leaves, 1)
        np.add.at(self.sums, leaves, digests(row_texts(rows)))

    def merge(self, counts: bytes, sums: bytes) -> None:
        """Add leaves of another part, as `to_bytes` gave them."""
        self.counts += np.frombuffer(counts, np.int64)
        self.sums += np.frombuffer(sums, np.uint64)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Counts and sums."""
        return self.counts.tobytes(), self.sums.tobytes()

    @property
    def rows(self) -> int:
        """How many were added."""
        return int(self.counts.sum())
