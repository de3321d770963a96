"""Deletion vectors of Iceberg tables: which rows of a data file the table does not show.

The vectors of one commit lie in one Puffin file (Iceberg's specification, "Puffin spec", blobs of
type `deletion-vector-v1`); metadata says of each of them where it begins, so that readers need not
look into the file's footer. Invariant: a data file has at most one vector. A new one takes the
place of the one before, and holds its positions, too.
"""

import dataclasses
import json
import struct
import uuid
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pyspark_tidemark.lake import roaring
from pyspark_tidemark.lake.files import file_system, is_on_disk, sync
from pyspark_tidemark.lake.iceberg.partitions import UNPARTITIONED, Partition
from pyspark_tidemark.lake.iceberg.storage import Storage, is_s3

_MAGIC: Final = b"PFA1"
_POSITION_FIELD: Final = 2147483645
"""Iceberg's reserved field of a row's position, which the vector is about."""


@dataclasses.dataclass(frozen=True)
class Vector:
    """Where the vector of a data file is; pickled into tasks."""

    location: str
    """Of the Puffin file."""
    offset: int
    size: int

    def positions(self, storage: Storage) -> Any:
        """The masked positions, sorted (NumPy int64).

        Raises:
            SourceError: ErrLakeDamaged.
        """
        with storage.errors_named(self.location):
            system, path = storage.open(self.location)
            with system.open_input_file(path) as file:
                data = file.read_at(self.size, self.offset)
        return roaring.positions_in(data, self.location)


@dataclasses.dataclass(frozen=True)
class Masked:
    """What is to be masked of a data file."""

    positions: Any
    """All positions that are masked from now on (sorted)."""
    replaced: Any = None
    """The vector that the file had (Iceberg's Java)."""
    partition: Partition = UNPARTITIONED
    """The file's: readers look for its vector there."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A new vector, complete in its file, which waits for a commit."""

    data_file: str
    """The location of the file whose rows it masks."""
    vector: Vector
    rows: int
    """How many it masks."""
    file_size: int
    """Of the Puffin file, in bytes."""
    replaced: Any = None
    """The vector that the data file had (Iceberg's Java)."""
    partition: Partition = UNPARTITIONED
    """The data file's."""


def no_positions() -> Any:
    """Those of a data file without a vector."""
    return np.empty(0, np.int64)


def written(storage: Storage, directory: str, masked: Mapping[str, Masked]) -> list[Mask]:
    """One Puffin file below `directory` with a vector for each data file, which `masked` has by
    their locations; durable on a disk.
    """
    if not masked:
        return []
    location = f"{directory}/{uuid.uuid4()}-deletes.puffin"
    data, blobs, vectors = bytearray(_MAGIC), [], []
    for data_file, of in masked.items():
        blob = roaring.framed(roaring.encoded(of.positions))
        vectors.append(Vector(location, len(data), len(blob)))
        blobs.append(_described(data_file, vectors[-1], len(of.positions)))
        data += blob
    data += _footer(blobs)
    _put(storage, location, bytes(data))
    return [
        Mask(data_file, vector, len(of.positions), len(data), of.replaced, of.partition)
        for vector, (data_file, of) in zip(vectors, masked.items(), strict=True)
    ]


def _described(data_file: str, vector: Vector, rows: int) -> dict[str, Any]:
    # A commit decides on snapshot and sequence number, so a vector's blob has -1 for both.
    return {
        "type": "deletion-vector-v1",
        "fields": [_POSITION_FIELD],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": vector.offset,
        "length": vector.size,
        "properties": {"referenced-data-file": data_file, "cardinality": str(rows)},
    }


def _footer(blobs: list[dict[str, Any]]) -> bytes:
    payload = json.dumps({"blobs": blobs, "properties": {"created-by": "tidemark"}}).encode()
    flags = 0  # the payload is not compressed
    return _MAGIC + payload + struct.pack("<iI", len(payload), flags) + _MAGIC


def _put(storage: Storage, location: str, data: bytes) -> None:
    with storage.errors_named(location):
        system, path = storage.open(location)
        if not is_s3(location):
            system.create_dir(path.rpartition("/")[0], recursive=True)
        with system.open_output_stream(path) as file:
            file.write(data)
        if is_on_disk(location):
            sync(file_system(location)[1])
