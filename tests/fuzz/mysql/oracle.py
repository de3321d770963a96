"""The writer's statements as MySQL has them: MariaDB's own forms said otherwise,
and MySQL's own beside them.
"""

# ruff: noqa: E501 (statements are shown on one line)

import re
from collections.abc import Callable
from typing import Final

from tests.fuzz.mysql import statements
from tests.fuzz.mysql.statements import Writer
from tests.mysqld import MYSQL_SYNTAX

_OWN_SYNTAX: Final = (
    (r"SET STATEMENT \w+=\w+ FOR ", ""),
    (r"ENGINE=Aria", "ENGINE=MyISAM"),
    (r"/\*M!100000 ", "/*!80000 "),
    (r"ALTER (IGNORE|ONLINE) TABLE", "ALTER TABLE"),
    (r"ALTER TABLE IF EXISTS", "ALTER TABLE"),
    (r"(ADD|DROP|MODIFY) (COLUMN|KEY|INDEX) IF (NOT )?EXISTS", r"\1 \2"),
    (r"(ALTER TABLE \S+\.plain ADD) IF NOT EXISTS", r"\1"),
    (r"^(\d: .*)CREATE OR REPLACE TABLE", r"\1CREATE TABLE"),
    (r"collation_connection=latin1_german1_ci", "collation_connection=utf8mb4_0900_as_cs"),
    (r"binlog_alter_two_phase", "binlog_transaction_compression"),
)  # fmt: skip
REPLACES: Final = re.compile(r"CREATE OR REPLACE TABLE (`[^`]+`|\w+)")
SETTINGS: Final = (
    "SET binlog_transaction_compression=ON", "SET binlog_transaction_compression=ON", "SET binlog_transaction_compression=OFF",
    "SET gtid_next='AUTOMATIC:blue'", "SET gtid_next='AUTOMATIC:green'", "SET gtid_next='AUTOMATIC'",
    "SET sql_generate_invisible_primary_key=ON", "SET default_collation_for_utf8mb4=utf8mb4_general_ci", "SET explicit_defaults_for_timestamp=0",
    "SET sql_mode='ANSI'", "SET sql_mode='HIGH_NOT_PRECEDENCE,PIPES_AS_CONCAT'", "SET sql_require_primary_key=ON", "SET sql_mode='TIME_TRUNCATE_FRACTIONAL'",
)  # fmt: skip


class OracleWriter(Writer):
    """Makes steps for a MySQL of Oracle's, by TIDEMARK_TEST_MYSQLD."""

    def begin(self) -> list[str]:
        return [in_mysql_syntax(step) for step in super().begin()]

    def step(self) -> str:
        if not self._script and self.random.random() < 0.12:
            return f"{self.random.randrange(statements.SESSIONS)}: {self._spelt(self._own())}"
        step = super().step()
        replaced = REPLACES.search(step)
        if replaced is not None:
            self._script.insert(0, in_mysql_syntax(step))
            return f"{step[0]}: DROP TABLE IF EXISTS {replaced[1]}"
        return in_mysql_syntax(step)

    def _own(self) -> str:
        """What MariaDB does not have."""
        name, dice = self._table(), self.random
        table, column, two = self._quoted(name), self._column(name), self._quoted(self._table())
        new = dice.choice(statements.NAMES)
        low, high = sorted((self._key(), self._key()))
        added = f"{self._quoted(new)} {self._definition(name, new, adds=True)}"
        instant = dice.choice(
            ("", ", ALGORITHM=INSTANT", ", ALGORITHM=INPLACE, LOCK=NONE", ", ALGORITHM=COPY")
        )
        made: Callable[[], str] = dice.choice(
            (
                lambda: dice.choice(SETTINGS),
                lambda: dice.choice(SETTINGS),
                lambda: f"ALTER TABLE {table} ADD COLUMN {added}{instant}",
                lambda: f"ALTER TABLE {table} ADD COLUMN {added} INVISIBLE{instant}",
                lambda: f"ALTER TABLE {table} DROP COLUMN {column}{instant}",
                lambda: f"ALTER TABLE {table} RENAME COLUMN {column} TO {self._quoted(new)}{instant}",
                lambda: f"ALTER TABLE {table} ADD {self._quoted(new)} {dice.choice(('INT DEFAULT (1 + 1)', 'JSON', 'JSON DEFAULT (JSON_ARRAY(1))', 'VECTOR(3)', 'TEXT DEFAULT (REPEAT(CHAR(65), 3))', 'VARCHAR(20) COLLATE utf8mb4_0900_ai_ci'))}",
                lambda: f"ALTER TABLE {table} ADD CONSTRAINT c_{new[0]} CHECK (id > -5) {dice.choice(('', 'NOT ENFORCED'))}",
                lambda: f"ALTER TABLE {table} DROP CONSTRAINT c_{new[0]}",
                lambda: f"ALTER TABLE {table} ADD INDEX f_{new[0]} ((id * 2)), ALTER INDEX f_{new[0]} INVISIBLE",
                lambda: f"ALTER TABLE {table} DROP INDEX f_{new[0]}, COMMENT 'x'",
                lambda: f"ALTER TABLE {table} ALTER COLUMN {column} SET {dice.choice(('VISIBLE', 'INVISIBLE', 'DEFAULT (3)'))}",
                lambda: f"CREATE TABLE IF NOT EXISTS {table} (PRIMARY KEY (id)) SELECT * FROM {two}",
                lambda: f"INSERT INTO {table} (id) VALUES ROW({low}), ROW({high}) AS new ON DUPLICATE KEY UPDATE id = new.id + 1",
                lambda: f"WITH c AS (SELECT {low} AS k) UPDATE {table}, c SET {column} = {self._value()} WHERE id = c.k",
                lambda: f"WITH c AS (SELECT {low} AS k) DELETE FROM {table} WHERE id IN (SELECT k FROM c)",
                lambda: f"REPLACE INTO {table} (id, {column}) VALUES ({low}, {dice.choice(('JSON_OBJECT(1, 2.50, 3, NOW(6))', 'STRING_TO_VECTOR(CHAR(91, 49, 44, 50, 44, 51, 93))', 'NOW(6)'))})",
                lambda: f"UPDATE {table} SET {column} = JSON_SET({column}, '$.a', {low}) WHERE id >= {low}",
                lambda: f"REPLACE INTO {table} TABLE {two}",
                lambda: dice.choice(("LOCK INSTANCE FOR BACKUP", "UNLOCK INSTANCE", f"EXPLAIN ANALYZE SELECT * FROM {table}", "CREATE ROLE IF NOT EXISTS r1", "GRANT SELECT ON *.* TO r1", "SET ROLE NONE", "DROP ROLE IF EXISTS r1", f"ANALYZE TABLE {table} UPDATE HISTOGRAM ON id", "FLUSH LOGS", "CREATE SPATIAL REFERENCE SYSTEM IF NOT EXISTS 990001 NAME 'x' DEFINITION ''")),
            )
        )  # fmt: skip
        return made()


def in_mysql_syntax(step: str) -> str:
    """A step of MariaDB's as MySQL has it."""
    for theirs, ours in (*MYSQL_SYNTAX, *_OWN_SYNTAX):
        step = re.sub(theirs, ours, step)
    return step
