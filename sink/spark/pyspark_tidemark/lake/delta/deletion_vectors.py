"""The deletion vectors of a Delta table as actions name them: in files of their own,
or in the log.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from pyspark_tidemark.lake.delta import roaring
from pyspark_tidemark.lake.files import file_system


class DeletionVectors:
    """The deletion vectors of a table; new ones go into one file, which is written by `close`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._id = uuid.uuid4()
        self._data = bytearray(roaring.VERSION)

    def add(self, positions: Any) -> dict[str, Any]:
        """How an action names a vector of these positions."""
        vector = roaring.encoded(positions)
        place = {
            "offset": len(self._data),
            "sizeInBytes": len(vector),
            "cardinality": len(positions),
        }
        self._data += roaring.framed(vector)
        return {"storageType": "u", "pathOrInlineDv": roaring.z85(self._id.bytes)} | place

    def read(self, named: Mapping[str, Any] | None) -> Any:
        """The positions of a vector, none for a file without one."""
        if named is None:
            return np.empty(0, np.int64)
        kind, place = named["storageType"], named["pathOrInlineDv"]
        if kind == "i":
            return roaring.decoded(roaring.unz85(place)[: named["sizeInBytes"]])
        location = (
            self._location(uuid.UUID(bytes=roaring.unz85(place[-20:])), place[:-20])
            if kind == "u"
            else place
        )
        system, path = file_system(location)
        with system.open_input_file(path) as file:
            data = file.read_at(named["sizeInBytes"] + roaring.FRAME_BYTES, named.get("offset", 1))
        return roaring.decoded(roaring.unframed(data))

    def close(self) -> None:
        """Write the new ones."""
        if len(self._data) == len(roaring.VERSION):
            return
        system, path = file_system(self._location(self._id, ""))
        with system.open_output_stream(path) as file:
            file.write(bytes(self._data))

    def _location(self, number: uuid.UUID, prefix: str) -> str:
        return f"{self._root}/{prefix}{'/' if prefix else ''}deletion_vector_{number}.bin"
