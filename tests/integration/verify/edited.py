"""A Delta table made from a changefeed, then edited by hand:
`python -m … FLIGHT START_TS END_TS PATH`.

Version 0 equals the upstream; then row 3 is deleted, row 5 changed, row 7 doubled, row 9999 added.
"""

import sys
import tempfile
from pathlib import Path

from pyspark_tidemark.lake.session import open_session


def main() -> None:
    endpoint, start_ts, end_ts, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        spark = open_session(
            master="local[2]", driver_memory="1g", directory=Path(directory), lake="delta", extra={}
        )
        changes = (
            spark.read.format("tidemark")
            .options(
                endpoint=endpoint,
                changefeed="shop",
                table="bank.accounts",
                startTs=start_ts,
                endTs=end_ts,
            )
            .load()
        )
        changes.drop("_op", "_start_ts", "_seq").write.format("delta").save(path)
        table = f"delta.`{path}`"
        for edit in (
            f"DELETE FROM {table} WHERE id = 3",
            f"UPDATE {table} SET balance = -1 WHERE id = 5",
            f"INSERT INTO {table} SELECT * FROM {table} WHERE id = 7",
            (
                f"INSERT INTO {table} SELECT _commit_ts, 9999 AS id, owner, balance, updated_at FROM "
                f"{table} WHERE id = 9"
            ),
        ):
            spark.sql(edit)
        spark.stop()


if __name__ == "__main__":
    main()
