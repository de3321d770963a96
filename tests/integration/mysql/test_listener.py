"""The dump's hook: keys, watermarks and DDL in the order of the log,
and rows that it adds at a watermark.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from server.puller.source import TableChange
from storage.meta.client import EtcdMeta
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span
from tests.integration.mysql.replica import following
from tests.mariadb import MariaDb

WATERMARKS = """
CREATE TABLE IF NOT EXISTS changefeed_dump.changefeed_dump_event (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
changefeed_id VARCHAR(128) NOT NULL UNIQUE, unique_identifier VARCHAR(32) NOT NULL, event_type TINYINT NOT NULL,
create_time INT NOT NULL, update_time INT NOT NULL)"""
UPSERT = """
INSERT INTO changefeed_dump.changefeed_dump_event
(changefeed_id, unique_identifier, event_type, create_time, update_time) VALUES ('feed', '{0}', {1}, 1, 1)
ON DUPLICATE KEY UPDATE unique_identifier = '{0}', event_type = {1}"""


class Recording:
    """Implements `LogListener`: remembers, and adds the row `key` at each high watermark."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.moved: list[tuple[str, bool]] = []
        self.span: Span | None = None
        self.row: tuple[bytes, bytes] = (b"", b"")

    def changed(self, span: Span, keys: pa.BinaryArray) -> None:
        self.span = span
        self.seen.append(len(keys))

    def watermark(
        self, values: Mapping[str, object], commit_ts: int
    ) -> Sequence[tuple[Span, pa.RecordBatch]]:
        self.seen.append(
            (values["changefeed_id"], values["unique_identifier"], values["event_type"])
        )
        if values["event_type"] != 2 or self.span is None:
            return ()
        key, value = self.row
        return [
            (self.span, raw_batch([commit_ts], [commit_ts - 1], [INSERT], [key], [value], [None]))
        ]

    def xa_moved(self, xid: str, *, waits: bool) -> None:
        self.moved.append((xid, waits))

    def changed_schema(self, change: TableChange) -> None:
        self.seen.append(change.query)


async def test_a_listener_is_told_of_keys_watermarks_and_ddl_in_the_order_of_the_log(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "CREATE DATABASE IF NOT EXISTS changefeed_dump",
        database=name,
    )
    mariadb.execute(WATERMARKS)
    listener = Recording()
    async with following(mariadb.uri, meta, f"{name}.*", listener=listener) as feed:
        mariadb.execute("INSERT INTO t VALUES (1), (2)", database=name)
        await feed.seen(f"{name}.t", 2)
        ((_, batch),) = feed.target.batches
        listener.row = (batch.column("key")[0].as_py(), batch.column("value")[0].as_py())
        mariadb.execute(
            *(
                UPSERT.format("u1", 1),
                "UPDATE t SET id = 3 WHERE id = 2",
                "DELETE FROM t WHERE id = 1",
            ),
            *(
                "BEGIN",
                "INSERT INTO t VALUES (4)",
                UPSERT.format("u1", 2),
                "INSERT INTO t VALUES (5)",
                "COMMIT",
            ),
            *(
                "XA START 'a'",
                "INSERT INTO t VALUES (8)",
                "XA END 'a'",
                "XA PREPARE 'a'",
                "XA COMMIT 'a'",
            ),
            *(
                "INSERT INTO t VALUES (6)",
                "ALTER TABLE t ADD COLUMN x INT",
                "INSERT INTO t VALUES (7, 7)",
            ),
            database=name,
        )
        changes = await feed.seen(f"{name}.t", 11)
    order = [each for each in listener.seen if not isinstance(each, int)]
    assert order == [("feed", "u1", 1), ("feed", "u1", 2), "ALTER TABLE t ADD COLUMN x INT"]
    keys = [0]
    for each in listener.seen:
        keys = [*keys, 0] if not isinstance(each, int) else [*keys[:-1], keys[-1] + each]
    assert listener.moved == [("61,", True), ("61,", False)]
    assert keys == [2, 5, 2, 1], "keys of a transaction are told before its watermark"
    added = [
        change["_commit_ts"]
        for change in changes
        if change["_op"] == "insert" and change["id"] == 1
    ][1]
    assert added == next(change["_commit_ts"] for change in changes if change["id"] == 4)
