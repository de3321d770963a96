"""Watermarks: one row for each changefeed, in a table of their own, changed each time.

    changefeed_dump.changefeed_dump_event(id, changefeed_id, unique_identifier, event_type, create_time, update_time)

`unique_identifier` is new each time, as an UPDATE that changes nothing is not logged. MySQL has no AUTO_RANDOM.
"""

from typing import Final

from server.puller.mysql.connection import Session
from server.puller.mysql.listener import WATERMARK_SCHEMA, WATERMARK_TABLE

TABLE: Final = f"{WATERMARK_SCHEMA}.{WATERMARK_TABLE}"
CREATE: Final = (
    f"CREATE DATABASE IF NOT EXISTS {WATERMARK_SCHEMA}",
    f"""CREATE TABLE IF NOT EXISTS {TABLE} (
id BIGINT NOT NULL AUTO_INCREMENT COMMENT 'primary key',
changefeed_id VARCHAR(128) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL COMMENT 'changefeed_id',
unique_identifier VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'uuid - optimistic lock',
event_type TINYINT NOT NULL COMMENT '1-low watermark; 2-high watermark',
create_time INT NOT NULL COMMENT 'create timestamp',
update_time INT NOT NULL COMMENT 'update timestamp',
PRIMARY KEY (id),
UNIQUE KEY (changefeed_id)
) ENGINE=InnoDB COMMENT 'written by tidemark while it dumps tables'""",
)
_EXISTS = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
_WRITE = (
    f"INSERT INTO {TABLE} (changefeed_id, unique_identifier, event_type, create_time, update_time)"  # noqa: S608 - names of ours
    " VALUES (%s, %s, %s, UNIX_TIMESTAMP(), UNIX_TIMESTAMP()) ON DUPLICATE KEY UPDATE"
    " unique_identifier = VALUES(unique_identifier), event_type = VALUES(event_type), update_time = VALUES(update_time)"
)


def prepare(session: Session) -> None:
    """Make the table, if it is not there.

    Raises:
        MySqlPrivilegeError, MySqlStatementError: the user may not, or the server only reads.
    """
    if not session.row(_EXISTS, (WATERMARK_SCHEMA, WATERMARK_TABLE))[0]:
        for statement in CREATE:
            session.execute(statement)


def write(session: Session, changefeed: str, unique_identifier: str, kind: int) -> None:
    """Write one; it is committed when this returns. Raises as `prepare`."""
    session.execute(_WRITE, (changefeed, unique_identifier, kind))
