"""`format("tidemark")`: chooses the reader, and gives Spark the table's types exactly as the captures send them."""

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, ChangefeedMeta, TableMeta
from pyspark_tidemark.options import Options, parse
from pyspark_tidemark.reader import BatchReader
from pyspark_tidemark.stream import CUT_SCHEMA, CutStreamReader, TableStreamReader


class DefaultSource(DataSource):
    """Tidemark as a Spark data source; see `options.NAMES` for its options."""

    @classmethod
    def name(cls) -> str:
        """The short name Spark finds it by."""
        return "tidemark"

    def schema(self) -> StructType:
        """`_op, _commit_ts, _start_ts, _seq` and the table's columns; in cuts mode `start_ts, end_ts`."""
        options = self._parsed()
        if options.table is None:
            return from_arrow_schema(CUT_SCHEMA)
        return from_arrow_schema(table_of(Changefeed(options).describe(), options.table).schema)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        """The batch reader of one table."""
        options = self._parsed()
        if options.table is None:
            raise SourceError("ErrOptionInvalid", "cuts can only be read as a stream: use spark.readStream")
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's signature
        """The stream reader of one table, or of the cuts."""
        options = self._parsed()
        return CutStreamReader(options) if options.table is None else TableStreamReader(options)

    def _parsed(self) -> Options:
        return parse(dict(self.options))


def table_of(changefeed: ChangefeedMeta, name: str) -> TableMeta:
    """The table called `name`.

    Raises:
        SourceError: ErrTableNotFound, listing those there are.
    """
    if name not in changefeed.tables:
        known = ", ".join(sorted(changefeed.tables)) or "none"
        raise SourceError("ErrTableNotFound", f"the changefeed has no table {name!r}; it has: {known}")
    return changefeed.tables[name]
