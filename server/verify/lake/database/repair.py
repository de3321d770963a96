"""Puts differing rows of a database's table right: one transaction, with its fence in it.

Invariants:
1. The lake's lock is held, and the fence row is locked and unchanged: what is repaired is what was compared.
2. The rows' `_commit_ts` is the cut, and the fence stays: changes of later cuts are larger, so they win.
"""

from typing import Any, Final

import pyarrow as pa
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.jdbc import tables
from pyspark_tidemark.lake.jdbc.database import STAGED, Database, explained
from pyspark_tidemark.lake.targets import database as database_of
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.question import Question

_REMOVE: Final = {
    "postgresql": "DELETE FROM {table} t USING {staged} s WHERE {same}",
    "mysql": "DELETE t FROM {table} t JOIN {staged} s ON {same}",
}
_UNSTAGE: Final = {
    "postgresql": f"DROP TABLE {STAGED}",
    "mysql": f"DROP TEMPORARY TABLE {STAGED}",  # without that word the server commits first
}


def repair(uri: SinkUri, changefeed: str, asked: Question, gone: Any, live: Any) -> int:
    """Remove keys, add rows (pyarrow.Tables); returns the cut.

    Raises:
        SourceError: ErrTargetBusy, a cut was applied meanwhile; ErrTargetUnavailable, ErrTargetRefused.
    """
    database = database_of(uri)
    rows = live.append_column("_commit_ts", pa.array([asked.ts] * len(live), pa.int64()))
    with explained(database):
        connection = database.connect()
        try:
            with connection.cursor() as cursor:
                known = tables.known(cursor, changefeed, asked.name, lock=True)
                if known is None or known.end_ts > asked.ts:
                    raise SourceError("ErrTargetBusy", f"a job has applied a cut to {asked.name}; verify again")
                name = database.quoted_table(asked.name)
                same = " AND ".join(f"t.{database.quoted(each)} = s.{database.quoted(each)}" for each in asked.key)
                _stage(cursor, database, gone, asked.key)
                cursor.execute(_REMOVE[uri.format].format(table=name, staged=STAGED, same=same))
                cursor.execute(_UNSTAGE[uri.format])
                _stage(cursor, database, rows, asked.key)
                columns = ", ".join(map(database.quoted, rows.schema.names))
                cursor.execute(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM {STAGED}")  # noqa: S608 - quoted
            connection.commit()
        finally:
            connection.close()
    return asked.ts


def _stage(cursor: Any, database: Database, rows: Any, key: tuple[str, ...]) -> None:
    types = [database.type_of(field.type, key_columns=len(key) if field.name in key else 0) for field in rows.schema]
    columns = [f"{database.quoted(name)} {kind}" for name, kind in zip(rows.schema.names, types, strict=True)]
    database.stage(cursor, columns, rows.to_batches(), key)
