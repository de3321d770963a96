"""The files that a commit names: as they were written, and as Iceberg's Java takes them."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_dict
from pyspark_tidemark.lake.files import file_system, is_on_disk
from pyspark_tidemark.lake.iceberg.files import Written
from pyspark_tidemark.lake.iceberg.java_catalog import explained
from pyspark_tidemark.lake.iceberg.partitions import UNPARTITIONED, Partition
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

    def __init__(self, classes: Any, new_ints: Any, place: str) -> None:
        """`classes` are the JVM's (`java_classes`); `new_ints` makes a Java array of ints of a
        length; errors name the `place`.
        """
        self._java = classes.java
        self._iceberg = classes.org.apache.iceberg
        self._new_ints = new_ints
        self._place = place

    def data(self, table: Any, file: Written) -> Any:
        """A data file as commits name it, with the column statistics of its footer."""
        spec = table.specs().get(file.partition.spec)
        builder = self._iceberg.DataFiles.builder(spec)
        if spec.isPartitioned():
            values = self._values.fromJson(spec.partitionType(), file.partition.values)
            builder = builder.withPartition(values)
        if file.sort_order:
            builder = builder.withSortOrder(table.sortOrders().get(file.sort_order))
        return self._with_metrics(table, builder, file).build()

    def partitions(self, table: Any, files: Sequence[Any]) -> list[Partition]:
        """The partitions of data files."""
        specs, current = table.specs(), table.spec()
        if not current.isPartitioned() and int(specs.size()) == 1:
            return [Partition(int(current.specId()), UNPARTITIONED.values)] * len(files)
        return [self._partition(specs.get(file.specId()), file) for file in files]

    def _partition(self, spec: Any, file: Any) -> Partition:
        number = int(spec.specId())
        if not spec.isPartitioned():
            return Partition(number, UNPARTITIONED.values)
        return Partition(number, self._values.toJson(spec.partitionType(), file.partition()))

    @property
    def _values(self) -> Any:
        return self._iceberg.SingleValueParser

    def check_global(self, table: Any, deletes: Iterable[Any]) -> None:
        """Check that equality deletes count for all rows of the table, as ours do.

        Raises:
            SourceError: ErrTargetForeign.
        """
        specs = table.specs()
        for each in deletes:
            if specs.get(each.specId()).isPartitioned():
                raise SourceError(
                    "ErrTargetForeign",
                    f"{each.location()} deletes keys in one partition only, which nothing here "
                    "writes: let whoever wrote it rewrite the table's data files",
                )

    def equality_deletes(self, table: Any, file: Written, key: Sequence[str]) -> Any:
        """An equality-delete file as commits name it.

        Raises:
            SourceError: ErrPartitionUnsupported, it could count in one partition only.
        """
        ids = field_ids(arrow_schema(self._iceberg.SchemaParser.toJson(table.schema())))
        numbers = self._new_ints(len(key))
        for at, column in enumerate(key):
            numbers[at] = ids[column]
        spec = self._unpartitioned(table)
        builder = self._iceberg.FileMetadata.deleteFileBuilder(spec).ofEqualityDeletes(numbers)
        return self._with_metrics(table, builder, file).build()

    def _unpartitioned(self, table: Any) -> Any:
        """A spec of the table without fields: a row that has moved to another partition goes by a
        delete that counts in all of them only (Iceberg's specification, "Scan Planning").
        """
        for spec in java_dict(table.specs()).values():
            if not spec.isPartitioned():
                return spec
        raise SourceError(
            "ErrPartitionUnsupported",
            f"{table.name()} has no unpartitioned spec any more, under which deletes of keys count "
            "in all partitions: use deletion vectors, which tables of format version 3 have",
        )

    def vectors(self, table: Any, masks: Sequence[Mask]) -> list[Any]:
        """Deletion vectors as commits name them."""
        # As JSON: a cut may mask rows of a hundred files, and each call of the JVM costs.
        nodes = self._iceberg.util.JsonUtil.mapper().readTree(
            json.dumps(list(map(_described, masks)))
        )
        parse = self._iceberg.ContentFileParser.fromJson
        specs = {
            number: table.specs().get(number) for number in {of.partition.spec for of in masks}
        }
        return [
            parse(nodes.get(place), specs[mask.partition.spec]) for place, mask in enumerate(masks)
        ]

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
        config, util = (
            self._iceberg.MetricsConfig.forTable(table),
            self._iceberg.parquet.ParquetUtil,
        )
        with explained(self._place):
            if is_on_disk(written.path):
                footer = self._footer(file_system(written.path)[1])
                metrics = util.footerMetrics(footer, self._java.util.stream.Stream.empty(), config)
            else:
                metrics = util.fileMetrics(file, config)
        return builder.withInputFile(file).withFormat("parquet").withMetrics(metrics)

    def _footer(self, path: str) -> Any:
        """The metadata of a Parquet file on a disk."""
        # As `fileMetrics` has it, which reads Hadoop's settings anew for each file: that took ten
        # times as long.
        file = self._parquet.io.LocalInputFile(self._java.io.File(path).toPath())
        reader = self._parquet.hadoop.ParquetFileReader.open(file, self._read_options)
        try:
            return reader.getFooter()
        finally:
            reader.close()

    @property
    def _parquet(self) -> Any:
        """Iceberg's own copy of Parquet's library."""
        return self._iceberg.shaded.org.apache.parquet

    @functools.cached_property
    def _read_options(self) -> Any:
        plain = self._parquet.conf.PlainParquetConfiguration()
        return self._parquet.ParquetReadOptions.builder(plain).build()


def _described(mask: Mask) -> dict[str, Any]:
    """A vector in the JSON of Iceberg's `ContentFileParser`."""
    return {
        "spec-id": mask.partition.spec,
        "content": "position-deletes",
        "file-path": mask.vector.location,
        "file-format": "puffin",
        "partition": json.loads(mask.partition.values),
        "file-size-in-bytes": mask.file_size,
        "record-count": mask.rows,
        "referenced-data-file": mask.data_file,
        "content-offset": mask.vector.offset,
        "content-size-in-bytes": mask.vector.size,
    }
