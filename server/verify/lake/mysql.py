"""A MySQL or MariaDB lake in one snapshot: rows in the binary protocol, read column by column."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.sink_uri import SinkUri

from server.changefeed.source import Address
from server.dump.mysql.chunk import quote_identifier, selected
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import log_in
from server.puller.mysql.session.options import MySqlOptions
from server.verify.lake.question import check_columns
from server.verify.mysql_upstream import begin_snapshot, query_rows
from storage.mysql.arrow import arrow_columns
from storage.mysql.schema import Table


class MySqlReader:
    """Implements `server.verify.lake.database_lake.Reader`."""

    def __init__(self, uri: SinkUri) -> None:
        ca = uri.option("ca-path")
        self._database = uri.path
        self._session = log_in(
            MySqlOptions(
                addresses=(Address(uri.host, uri.port),),
                user=uri.user,
                password_file=uri.option("password-file"),
                password_env=uri.option("password-env"),
                tls="verify" if ca else "off",
                ca=ca,
            )
        )
        try:
            begin_snapshot(self._session)
        except BaseException:
            self._session.close()
            raise

    def quoted(self, name: str) -> str:
        """See `Reader`."""
        return quote_identifier(name)

    def quoted_table(self, name: str) -> str:
        """See `Reader`."""
        return ".".join(map(quote_identifier, name.split(".", 1)))

    def manifest(self, changefeed: str) -> tuple[str | None, Mapping[str, int]]:
        """See `Reader`."""
        cuts, fences = (
            f"{quote_identifier(self._database)}.{name} WHERE app = %s"
            for name in (manifest.CUTS, manifest.TABLES)
        )
        newest = f"SELECT document FROM {cuts} ORDER BY end_ts DESC LIMIT 1"  # noqa: S608 - ours
        documents = self._session.execute(newest, (changefeed,))
        rows = self._session.execute(f"SELECT name, end_ts FROM {fences}", (changefeed,))  # noqa: S608 - ours
        return (str(documents[0][0]) if documents else None), {
            str(name): int(ts) for name, ts in rows
        }

    def batches(self, table: str, query: str, schema: Any) -> Iterator[Any]:
        """See `Reader`."""
        schema_name, _, name = table.partition(".")
        definition = read_definitions(self._session, [(schema_name, name)])[schema_name, name]
        by_name = {column.name: column for column in definition.columns}
        check_columns(table, schema.names, by_name)
        columns = tuple(by_name[each] for each in schema.names)
        shape = Table(1, name, columns, ())
        for rows in query_rows(
            self._session, query.replace("{columns}", ", ".join(map(selected, columns)))
        ):
            yield pa.RecordBatch.from_arrays(arrow_columns(shape, rows), schema.names)

    def close(self) -> None:
        """See `Reader`."""
        self._session.close()
