"""The files that a commit names: as they were written, and as Iceberg's Java takes them."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyspark_tidemark.lake.iceberg.files import Written
from pyspark_tidemark.lake.iceberg.java_catalog import explained
from pyspark_tidemark.lake.iceberg.types import arrow_schema, field_ids
from pyspark_tidemark.lake.iceberg.vectors import Mask


class CutFiles(NamedTuple):
    """The files that a commit puts into a table."""

    written: Sequence[Written]
    key: Sequence[str] = ()
    """What the equality deletes among them name."""
    masks: Sequence[Mask] = ()
    removed: Sequence[Any] = ()
    """Equality deletes (Iceberg's Java) that go."""


class Committed(NamedTuple):
    """The same files as Iceberg's Java names them."""

    rows: Sequence[Any]
    masks: Sequence[tuple[Mask, Any]] = ()
    deletes: Sequence[str] = ()
    """The locations of equality deletes."""


class JavaFiles:
    """Makes Iceberg's descriptions of files, and reads what they say."""

    def __init__(self, iceberg: Any, new_ints: Any, place: str) -> None:
        """`iceberg` is the package `org.apache.iceberg`; `new_ints` makes a Java array of ints of a
        length; errors name the `place`.
        """
        self._iceberg = iceberg
        self._new_ints = new_ints
        self._place = place

    def data(self, table: Any, file: Written) -> Any:
        """A data file as commits name it, with the column statistics of its footer."""
        builder = self._iceberg.DataFiles.builder(table.spec())
        return self._with_metrics(table, builder, file).build()

    def equality_deletes(self, table: Any, file: Written, key: Sequence[str]) -> Any:
        """An equality-delete file as commits name it."""
        ids = field_ids(arrow_schema(self._iceberg.SchemaParser.toJson(table.schema())))
        numbers = self._new_ints(len(key))
        for at, column in enumerate(key):
            numbers[at] = ids[column]
        builder = self._iceberg.FileMetadata.deleteFileBuilder(table.spec()).ofEqualityDeletes(
            numbers
        )
        return self._with_metrics(table, builder, file).build()

    def vectors(self, table: Any, masks: Sequence[Mask]) -> list[Any]:
        """Deletion vectors as commits name them."""
        # As JSON: a cut may mask rows of a hundred files, and each call of the JVM costs.
        described = [_described(mask, int(table.spec().specId())) for mask in masks]
        nodes = self._iceberg.util.JsonUtil.mapper().readTree(json.dumps(described))
        parse, spec = self._iceberg.ContentFileParser.fromJson, table.spec()
        return [parse(nodes.get(place), spec) for place in range(len(masks))]

    def bounds(self, file: Any, number: int, kind: Any) -> tuple[Any, Any] | None:
        """The lowest and the highest value of a column in a file, or what bounds them;
        None if that is not known.
        """
        low, high = file.lowerBounds(), file.upperBounds()
        if low is None or high is None or low.get(number) is None or high.get(number) is None:
            return None
        ends = [
            self._iceberg.types.Conversions.fromByteBuffer(kind, bound.get(number))
            for bound in (low, high)
        ]
        plain = [str(end.toString()) if hasattr(end, "toString") else end for end in ends]
        return plain[0], plain[1]

    def _with_metrics(self, table: Any, builder: Any, written: Written) -> Any:
        # With its size, S3 need not be asked for that.
        file = table.io().newInputFile(written.path, written.size)
        with explained(self._place):
            metrics = self._iceberg.parquet.ParquetUtil.fileMetrics(
                file, self._iceberg.MetricsConfig.forTable(table)
            )
        return builder.withInputFile(file).withFormat("parquet").withMetrics(metrics)


def _described(mask: Mask, spec: int) -> dict[str, Any]:
    """A vector in the JSON of Iceberg's `ContentFileParser`."""
    return {
        "spec-id": spec,
        "content": "position-deletes",
        "file-path": mask.vector.location,
        "file-format": "puffin",
        "partition": [],
        "file-size-in-bytes": mask.file_size,
        "record-count": mask.rows,
        "referenced-data-file": mask.data_file,
        "content-offset": mask.vector.offset,
        "content-size-in-bytes": mask.vector.size,
    }
