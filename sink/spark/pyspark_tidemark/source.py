"""`format("tidemark")`: chooses the reader, and gives Spark the columns exactly as the captures
send them.

What reads is imported where it is needed. For each query Spark starts a Python process that looks
for data sources, and one that asks for the columns; to load Arrow was half of what these cost.
"""

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import LongType, StructField, StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.options import Options, parse

_CUTS = StructType([StructField(name, LongType()) for name in ("start_ts", "end_ts")])


class DefaultSource(DataSource):
    """Tidemark as a Spark data source; see `options.NAMES` for its options."""

    @classmethod
    def name(cls) -> str:
        """The short name Spark finds it by."""
        return "tidemark"

    def schema(self) -> StructType:
        """`_op, _commit_ts, _start_ts, _seq` and the table's columns; the envelope's;
        of cuts `start_ts, end_ts`. With `commitTime`, `_commit_time` is behind `_commit_ts`.

        Raises:
            SourceError: ErrOptionInvalid, ErrTableNotFound, ErrBeforeImageUnsupported, or what a
                capture refused with.
        """
        options = self._parsed()
        return _CUTS if _reads_cuts(options) else _columns(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The batch reader."""
        options = self._parsed()
        if _reads_cuts(options):
            raise SourceError(
                "ErrOptionInvalid", "cuts can only be read as a stream: use spark.readStream"
            )
        from pyspark_tidemark.reader import BatchReader

        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The stream reader of rows, or of the cuts."""
        from pyspark_tidemark.stream import CutStreamReader, RowStreamReader

        options = self._parsed()
        return (
            CutStreamReader(options) if _reads_cuts(options) else RowStreamReader(options, schema)
        )

    def _parsed(self) -> Options:
        return parse(dict(self.options))


def _reads_cuts(options: Options) -> bool:
    return options.table is None and not options.envelope


def _columns(options: Options) -> StructType:
    from pyspark_tidemark.query_schema import with_commit_time

    columns = _columns_sent(options)
    return with_commit_time(columns) if options.commit_time else columns


def _columns_sent(options: Options) -> StructType:
    """The envelope's, else those of rows above schemaTs, else above the larger of startTs and the
    checkpoint.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from pyspark_tidemark.connection import FIRST_S
    from pyspark_tidemark.flight import BEFORE, Changefeed
    from pyspark_tidemark.query_schema import spark_schema, table_of
    from pyspark_tidemark.reader import ENVELOPE_SCHEMA

    if options.envelope or options.table is None:
        return from_arrow_schema(ENVELOPE_SCHEMA)
    changefeed = Changefeed(options)
    described = changefeed.describe(options.schema_ts, retry_s=FIRST_S)
    # Rows begin at startTs then, and have the columns that the table has there.
    if options.schema_ts is None and (options.start_ts or 0) > described.checkpoint_ts:
        described = changefeed.describe(options.start_ts)
    described_table = table_of(described, options.table)
    if options.before_image and BEFORE not in described_table.schema.names:
        raise SourceError(
            "ErrBeforeImageUnsupported",
            "the captures send no before-images; leave out 'beforeImage'",
        )
    return spark_schema(described_table)
