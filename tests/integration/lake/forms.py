"""Statements that people write, and that lakes once followed wrongly in silence:
each works on a table of its own.

A table has rows before its statements, and is written to after them, so that old rows, moved ones
and new ones are there in the end. `{t}` in a statement is the form's table, qualified; a session of
its own runs a form's statements.
"""

# ruff: noqa: E501 (statements are shown on one line)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.integration.mysql.test_defaults import FORMS as DEFAULTS

PLAIN: Final = "id INT PRIMARY KEY, v INT, x INT, y INT, u INT"
ROWS: Final = "(1, 10, 100, 1000, NULL), (2, 20, 200, 2000, 7), (3, 30, 300, 3000, NULL)"
LATER: Final = (
    "UPDATE {t} SET id = id + 10 WHERE id = 1",
    "DELETE FROM {t} WHERE id = 2",
    "INSERT INTO {t} (id) VALUES (4)",
)
"""Row 3 stays as the statements left it."""
MOVED: Final = "moved"
"""The schema of tables that get another name, which Iceberg's tables cannot."""


@dataclass(frozen=True)
class Form:
    """Statements, and the table that they find."""

    statements: Sequence[str]
    columns: str = PLAIN
    rows: str = ROWS
    before: Sequence[str] = ()
    """What else must be there when the changefeed begins."""
    later: Sequence[str] = LATER
    schema: str = "shop"
    fails: str = ""
    """The statement that the server refuses."""


def _short(kind: str, value: str, *statements: str) -> Form:
    """A table with one more column."""
    return Form(
        statements,
        f"id INT PRIMARY KEY, v INT, c {kind}",
        f"(1, 10, {value}), (2, 20, {value}), (3, 30, {value})",
    )


def _in_transaction(*statements: str) -> Form:
    """Whose savepoints are in the log."""
    begun = ("BEGIN", "INSERT INTO {t} VALUES (21, 1)")
    return Form(
        (*begun, *statements, "COMMIT"), "id INT PRIMARY KEY, v INT", "(1, 10), (2, 20), (3, 30)"
    )


_SPELT: Final[Mapping[str, Form]] = {
    name: Form(statements)
    for name, statements in {
        "comment_before": ["/* app:migrate */ ALTER TABLE {t} RENAME COLUMN v TO w"],
        "dashes_before": ["-- x\nALTER TABLE {t} RENAME COLUMN v TO w"],
        "hash_before": ["# x\nALTER TABLE {t} RENAME COLUMN v TO w"],
        "comment_between": ["ALTER TABLE {t} RENAME /* x */ COLUMN v TO w"],
        "executable_comment": ["ALTER TABLE {t} /*!50000 CHANGE v w INT */"],
        "no_blanks": ["ALTER TABLE {t} RENAME COLUMN`v`TO`w`"],
        "ansi_quotes": ["SET sql_mode='ANSI_QUOTES'", 'ALTER TABLE {t} RENAME COLUMN "v" TO "w"'],
        "if_exists": ["ALTER TABLE {t} RENAME COLUMN IF EXISTS v TO w"],
        "other_case": ["ALTER TABLE {t} RENAME COLUMN V TO w"],
        "only_case": ["ALTER TABLE {t} RENAME COLUMN v TO V"],
        "change_other_case": ["ALTER TABLE {t} CHANGE V w INT"],
        "change_qualified": ["ALTER TABLE {t} CHANGE {t}.v w INT"],
        "change_and_widen": ["ALTER TABLE {t} CHANGE v w BIGINT"],
        "modify_other_case": ["ALTER TABLE {t} MODIFY V BIGINT"],
        "modify_key": ["ALTER TABLE {t} MODIFY ID BIGINT"],
        "swap": ["ALTER TABLE {t} RENAME COLUMN x TO y, RENAME COLUMN y TO x"],
        "swap_by_change": ["ALTER TABLE {t} CHANGE x y INT, CHANGE y x INT"],
        "swap_and_widen": ["ALTER TABLE {t} CHANGE x y BIGINT, CHANGE y x INT"],
        "shift": ["ALTER TABLE {t} RENAME COLUMN x TO y, RENAME COLUMN y TO z"],
        "rename_and_add": ["ALTER TABLE {t} RENAME COLUMN v TO w, ADD COLUMN v INT DEFAULT 77"],
        "drop_and_add": ["ALTER TABLE {t} DROP v, ADD v INT DEFAULT 5"],
        "drop_and_add_without_default": ["ALTER TABLE {t} DROP v, ADD v INT"],
        "comment_like_a_rename": ["ALTER TABLE {t} ADD z INT DEFAULT 8 COMMENT 'rename column v to z later'"],
        "drop_like_a_rename": ["ALTER TABLE {t} DROP x, ADD z INT DEFAULT 8 COMMENT 'rename column x to z'"],
        "two_adds": ["ALTER TABLE {t} ADD p INT DEFAULT 3", "ALTER TABLE {t} ADD q INT DEFAULT 4"],
        "two_renames": ["ALTER TABLE {t} RENAME COLUMN v TO a", "ALTER TABLE {t} RENAME COLUMN a TO b"],
        "drop_then_add": ["ALTER TABLE {t} DROP v", "ALTER TABLE {t} ADD v INT DEFAULT 9"],
        "add_then_rename": ["ALTER TABLE {t} ADD n INT DEFAULT 5", "ALTER TABLE {t} RENAME COLUMN n TO m"],
        "set_statement_rename": ["SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE {t} RENAME COLUMN v TO w"],
        "set_statement_add": ["SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE {t} ADD w INT DEFAULT 5"],
        "set_statement_truncate": ["SET STATEMENT lock_wait_timeout=5 FOR TRUNCATE TABLE {t}"],
        "hidden_hash": ["ALTER TABLE {t} ADD b LONGTEXT, ADD UNIQUE (b)", "INSERT INTO {t} (id, b) VALUES (30, 'long')"],
        "lost_delete": ["SET sql_log_bin=0", "DELETE FROM {t} WHERE id = 3", "SET sql_log_bin=1", "INSERT INTO {t} (id, v) VALUES (3, 31)"],
    }.items()
}  # fmt: skip
"""Of the plain table (causes A and B, and C where the statement is DDL)."""

_REPLACED: Final[Mapping[str, Form]] = {
    "swap_with_the_key": Form(
        ["ALTER TABLE {t} RENAME COLUMN id TO v, RENAME COLUMN v TO id"],
        later=["UPDATE {t} SET v = 11 WHERE v = 1", "DELETE FROM {t} WHERE v = 2", "INSERT INTO {t} (v) VALUES (4)"],
    ),
    "replace": Form(["CREATE OR REPLACE TABLE {t} (id INT PRIMARY KEY, v INT)", "INSERT INTO {t} VALUES (3, 9)"]),
    "replace_by_set": Form(["SET STATEMENT lock_wait_timeout=5 FOR CREATE OR REPLACE TABLE {t} (id BIGINT PRIMARY KEY, w DATE)"]),
    "replace_like": Form(["CREATE OR REPLACE TABLE {t} LIKE away.other"], later=["INSERT INTO {t} (k) VALUES ('a')"]),
    "replace_as_select": Form(["CREATE OR REPLACE TABLE {t} (PRIMARY KEY (id)) AS SELECT 2 AS id, 'new' AS v UNION SELECT 3, 'new'"]),
    "replace_that_fails": Form(
        ["CREATE OR REPLACE TABLE {t} (id INT PRIMARY KEY, c INT DEFAULT 'x')", "CREATE TABLE {t} (id INT PRIMARY KEY, v INT)"],
        fails="CREATE OR REPLACE TABLE {t} (id INT PRIMARY KEY, c INT DEFAULT 'x')",
    ),
    "drop_and_create": Form(["DROP TABLE {t}", "CREATE TABLE {t} (k VARCHAR(9) PRIMARY KEY, v INT)"], later=["INSERT INTO {t} VALUES ('a', 1)"]),
    "set_statement_drop_database": Form(["SET STATEMENT lock_wait_timeout=5 FOR DROP DATABASE gone"], schema="gone", later=()),
    "create_as_select": Form(["SET binlog_format=MIXED", "CREATE TABLE shop.selected (PRIMARY KEY (id)) AS SELECT * FROM {t}", "SET binlog_format=ROW", "INSERT INTO shop.selected (id) VALUES (9)"]),
    "partition": Form(["SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE {t} TRUNCATE PARTITION p0"], before=["ALTER TABLE {t} PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (3), PARTITION p1 VALUES LESS THAN MAXVALUE)"]),
    "fails_in_two_phases": Form(
        ["SET binlog_alter_two_phase=ON", "ALTER TABLE {t} RENAME COLUMN v TO w, ADD UNIQUE KEY (k)"],
        "id INT PRIMARY KEY, v INT, k INT", "(1, 10, 5), (2, 20, 5), (3, 30, 5)",
        fails="ALTER TABLE {t} RENAME COLUMN v TO w, ADD UNIQUE KEY (k)",
    ),
    "two_phases": Form(["SET binlog_alter_two_phase=ON", "ALTER TABLE {t} RENAME COLUMN v TO w, ADD v INT DEFAULT 6"]),
}  # fmt: skip
"""Cause C: tables that end, begin or keep what they have."""

_UNDONE: Final[Mapping[str, Form]] = {
    "savepoint_temporary": _in_transaction("CREATE TEMPORARY TABLE away.tmp (a INT)", "SAVEPOINT s1", "INSERT INTO {t} VALUES (22, 2)", "DELETE FROM {t} WHERE id = 3", "ROLLBACK TO s1"),
    "savepoint_temporary_first": _in_transaction("SAVEPOINT s1", "CREATE TEMPORARY TABLE away.tmp (a INT)", "INSERT INTO {t} VALUES (22, 2)", "UPDATE {t} SET v = 99 WHERE id = 3", "ROLLBACK TO s1", "INSERT INTO {t} VALUES (23, 3)"),
    "savepoint_myisam": _in_transaction("SAVEPOINT s1", "INSERT INTO {t} VALUES (22, 2)", "INSERT INTO away.my VALUES (1)", "ROLLBACK TO s1"),
    "savepoint_myisam_first": _in_transaction("INSERT INTO away.my VALUES (1)", "SAVEPOINT s1", "INSERT INTO {t} VALUES (22, 2)", "ROLLBACK TO s1"),
    "savepoint_aria": _in_transaction("SAVEPOINT s1", "INSERT INTO {t} VALUES (22, 2)", "INSERT INTO away.aria VALUES (1)", "ROLLBACK TO s1"),
}  # fmt: skip
"""Cause C: rows that ROLLBACK TO SAVEPOINT takes back."""

_REREAD: Final[Mapping[str, Form]] = {
    "not_null": Form(["SET sql_mode=''", "ALTER TABLE {t} MODIFY u INT NOT NULL"]),
    "shorter": _short("VARCHAR(9)", "'abcdef'", "SET sql_mode=''", "ALTER TABLE {t} MODIFY c VARCHAR(3)"),
    "fewer_fractions": _short("DATETIME(6)", "'2024-01-01 10:00:00.654321'", "ALTER TABLE {t} MODIFY c DATETIME"),
    "other_charset": _short("VARCHAR(9) CHARACTER SET utf8mb4", "'日é'", "SET sql_mode=''", "ALTER TABLE {t} CONVERT TO CHARACTER SET latin1"),
    "set_reordered": _short("SET('x','y')", "'x,y'", "ALTER TABLE {t} MODIFY c SET('y','x')"),
    "enum_reordered": _short("ENUM('x','y')", "'x'", "ALTER TABLE {t} MODIFY c ENUM('y','x')"),
    "auto_increment": Form(["ALTER TABLE {t} ADD n INT NOT NULL AUTO_INCREMENT UNIQUE, ADD g INT AS (v * 2) STORED"]),
    "generated": Form(["ALTER TABLE {t} ADD g INT AS (v * 2) STORED"]),
    "generated_otherwise": Form(["ALTER TABLE {t} MODIFY s INT AS (v * 5) STORED"], "id INT PRIMARY KEY, v INT, s INT AS (v * 3) STORED", "(1, 10, DEFAULT), (2, 20, DEFAULT), (3, 30, DEFAULT)"),
    "ignore": Form(["ALTER IGNORE TABLE {t} MODIFY c VARCHAR(3)"], "id INT PRIMARY KEY, c VARCHAR(9) UNIQUE", "(3, 'abc1'), (1, 'abc2'), (2, 'xyz')"),
    "computed_bytes": Form(["ALTER TABLE {t} MODIFY c VARCHAR(9) CHARACTER SET utf8mb4"], "id INT PRIMARY KEY, v INT, c VARCHAR(9) CHARACTER SET latin1, l INT AS (LENGTH(c))", "(1, 10, 'é', DEFAULT), (2, 20, 'x', DEFAULT), (3, 30, 'éé', DEFAULT)"),
    "implicit_timestamp": Form(["SET explicit_defaults_for_timestamp=OFF", "ALTER TABLE {t} ADD at TIMESTAMP"]),
    "unlogged": Form(["SET sql_log_bin=0", "ALTER TABLE {t} ADD w INT DEFAULT 5, RENAME COLUMN v TO q", "SET sql_log_bin=1", "INSERT INTO {t} (id) VALUES (30)"]),
    "ghost": Form(["CREATE TABLE away._gho LIKE {t}", "ALTER TABLE away._gho ADD w INT NOT NULL DEFAULT 5", "INSERT INTO away._gho (id, v, x, y, u) SELECT * FROM {t}", "RENAME TABLE {t} TO away._del, away._gho TO {t}"]),
    "nulls_in_other_key": Form(["SET sql_mode=''", "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (id, U)"], later=["UPDATE {t} SET u = 8 WHERE id = 1", "DELETE FROM {t} WHERE id = 2", "INSERT INTO {t} (id, u) VALUES (3, 5)"]),
    "nulls_in_renamed_key": Form(["SET sql_mode=''", "ALTER TABLE {t} DROP PRIMARY KEY, RENAME COLUMN u TO w, ADD PRIMARY KEY (id, w)"], later=["UPDATE {t} SET w = 8 WHERE id = 1", "DELETE FROM {t} WHERE id = 2", "INSERT INTO {t} (id, w) VALUES (3, 5)"]),
    "other_key": Form(["ALTER TABLE {t} ADD uid INT AUTO_INCREMENT, DROP PRIMARY KEY, ADD PRIMARY KEY (uid)", "UPDATE {t} SET v = 9 WHERE id = 3"]),
}  # fmt: skip
"""Cause D: no event tells what the ALTER did to values."""

_BESIDE: Final[Mapping[str, Form]] = {
    "geometry": Form(["ALTER TABLE {t} ADD g POINT NOT NULL", "UPDATE {t} SET g = POINT(1, 2) WHERE id = 3"]),
    "exchanged": Form(["ALTER TABLE {t} EXCHANGE PARTITION p0 WITH TABLE away.exchanged"], before=["CREATE TABLE away.exchanged LIKE {t}", "INSERT INTO away.exchanged (id, v) VALUES (1, 5), (3, 6)", "ALTER TABLE {t} PARTITION BY HASH (id) PARTITIONS 1"]),
    "exchanged_from_away": Form(["ALTER TABLE away.parted EXCHANGE PARTITION p0 WITH TABLE {t}"], before=["CREATE TABLE away.parted LIKE {t}", "INSERT INTO away.parted (id, v) VALUES (1, 5), (3, 6)", "ALTER TABLE away.parted PARTITION BY HASH (id) PARTITIONS 1"]),
    "converted": Form(["ALTER TABLE {t} CONVERT PARTITION p0 TO TABLE shop.of_partition"], before=["ALTER TABLE {t} PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (2), PARTITION p1 VALUES LESS THAN MAXVALUE)"]),
}  # fmt: skip
"""Rows that come and go beside the log, and values that a new column has without a default."""

_TYPED: Final[Mapping[str, Form]] = {
    "odd_types": Form(["ALTER TABLE {t} ADD a UUID DEFAULT '018f0000-0000-7000-8000-000000000000' FIRST, ADD b INET6 NOT NULL, ADD c INET4 DEFAULT '10.0.0.1' AFTER id, ADD d DECIMAL(65,30) DEFAULT 1.5, ADD e BIGINT UNSIGNED DEFAULT 18446744073709551615, ADD f YEAR DEFAULT 1999, ADD g BIT(9) DEFAULT b'101', ADD h TIME(2) DEFAULT '-01:02:03.04', ADD i JSON DEFAULT '{\"a\": 1}', ADD j DATE NOT NULL DEFAULT '0000-00-00', ADD k INT INVISIBLE DEFAULT 7"]),
    "unique_becomes_key": Form(["ALTER TABLE {t} DROP PRIMARY KEY, ADD UNIQUE later (v)", "UPDATE {t} SET id = 7", "CREATE OR REPLACE UNIQUE INDEX later ON {t} (v, id)"], "id INT PRIMARY KEY, v INT NOT NULL", "(1, 10), (2, 20), (3, 30)", later=["UPDATE {t} SET v = 11 WHERE v = 10", "DELETE FROM {t} WHERE v = 20", "INSERT INTO {t} VALUES (7, 40)"]),
    "keys_change_places": Form(["BEGIN", "UPDATE {t} SET id = -1 WHERE id = 3", "UPDATE {t} SET id = 3 WHERE id = 2", "UPDATE {t} SET id = 2 WHERE id = -1", "COMMIT"]),
}  # fmt: skip
"""Types, keys and key values of which lakes have no like."""

_REKEYED: Final[Mapping[str, Form]] = {
    name: Form([statement], "id INT PRIMARY KEY, v INT NOT NULL, x INT", "(1, 10, 100), (2, 20, 200), (3, 30, 300)", later=later)
    for name, statement, later in (
        ("only_key", "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (v)", ["UPDATE {t} SET v = v + 1 WHERE id = 1", "UPDATE {t} SET id = 1 WHERE v = 20", "DELETE FROM {t} WHERE v = 20", "INSERT INTO {t} VALUES (3, 40, 1)"]),
        ("wider_key", "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (id, v)", ["INSERT INTO {t} VALUES (3, 31, 9)", "UPDATE {t} SET v = v + 1 WHERE id = 1", "DELETE FROM {t} WHERE id = 2"]),
        ("added_with_key", "ALTER TABLE {t} ADD n INT, DROP PRIMARY KEY, ADD PRIMARY KEY (id, N)", ["UPDATE {t} SET n = 8 WHERE id = 1", "DELETE FROM {t} WHERE id = 2", "INSERT INTO {t} (id, v, n) VALUES (3, 5, 5)"]),
        ("key_and_column", "ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (id), RENAME COLUMN id TO v2, RENAME COLUMN v TO id", ["UPDATE {t} SET id = id + 1 WHERE v2 = 1", "DELETE FROM {t} WHERE id = 20", "INSERT INTO {t} VALUES (3, 40, 1)"]),
    )
}  # fmt: skip
"""The key alone is another one: what identified a row is a value like others."""

_COMPUTED: Final = (
    "CURRENT_TIMESTAMP",
    "CONCAT",
    "FLOAT(5,2)",
    "TIMESTAMP DEFAULT '",
    "TIMESTAMP(3) DEFAULT '",
)
_TOLD: Final = [form for form in DEFAULTS if not any(word in form for word in _COMPUTED)]
_UNTOLD: Final = [form for form in DEFAULTS if any(word in form for word in _COMPUTED)]


def _adding(forms: Sequence[str]) -> Form:
    """All of them in one ALTER."""
    added = ", ".join(f"ADD c{number} {form}" for number, form in enumerate(forms))
    return Form(["SET sql_mode=''", f"ALTER TABLE {{t}} {added}"])


_RENAMED: Final[Mapping[str, Form]] = {
    "set_statement_rename_table": Form(["SET STATEMENT lock_wait_timeout=5 FOR RENAME TABLE {t} TO moved.another"], schema=MOVED, later=[each.format(t="moved.another") for each in LATER]),
    "key_and_name": Form(["ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (v), RENAME TO moved.rekeyed"], "id INT PRIMARY KEY, v INT NOT NULL", "(1, 10), (2, 20), (3, 30)", schema=MOVED, later=["UPDATE moved.rekeyed SET v = 11 WHERE id = 1", "DELETE FROM moved.rekeyed WHERE v = 20", "INSERT INTO moved.rekeyed VALUES (3, 40)"]),
    "swapped": Form(["INSERT INTO moved.partner VALUES (1, 1), (2, 2), (3, 3), (5, 5)", "RENAME TABLE {t} TO moved.between, moved.partner TO {t}, moved.between TO moved.partner"], schema=MOVED, later=[*LATER, "UPDATE moved.partner SET v = 5 WHERE id = 3"], before=["CREATE TABLE moved.partner (id INT PRIMARY KEY, v INT)"]),
}  # fmt: skip

FORMS: Final[Mapping[str, Form]] = {
    **_SPELT,
    **_REPLACED,
    **_UNDONE,
    **_REREAD,
    **_BESIDE,
    **_TYPED,
    **_REKEYED,
    **_RENAMED,
    "defaults": _adding(_TOLD),
    "defaults_untold": _adding(_UNTOLD),
}
OF_MYSQL: Final[Mapping[str, Form]] = {
    "instant": Form(["ALTER TABLE {t} ADD COLUMN z INT DEFAULT 8 FIRST, ALGORITHM=INSTANT", "ALTER TABLE {t} DROP COLUMN x, ALGORITHM=INSTANT"]),
    "invisible": Form(["ALTER TABLE {t} ADD h INT DEFAULT 7 INVISIBLE", "ALTER TABLE {t} ALTER COLUMN v SET INVISIBLE"]),
    "generated_key": Form(["SET sql_generate_invisible_primary_key=ON", "CREATE TABLE shop.keyless (v INT)", "INSERT INTO shop.keyless VALUES (1), (2), (3)", "UPDATE shop.keyless SET v = 9 WHERE v = 2", "DELETE FROM shop.keyless WHERE v = 1"]),
    "virtual": Form(["ALTER TABLE {t} ADD g INT AS (v + 1) VIRTUAL"]),
    "functional_index": Form(["ALTER TABLE {t} ADD INDEX f ((v * 2))", "ALTER TABLE {t} ADD w INT DEFAULT 1", "ALTER TABLE {t} ALTER INDEX f INVISIBLE"]),
    "check": Form(["ALTER TABLE {t} ADD CONSTRAINT few CHECK (v < 1000), ADD w INT DEFAULT 2", "ALTER TABLE {t} ALTER CHECK few NOT ENFORCED", "ALTER TABLE {t} DROP CONSTRAINT few"]),
    "expression_default": Form(["ALTER TABLE {t} ADD w INT DEFAULT (1 + 2)"]),
    "histogram": Form(["ANALYZE TABLE {t} UPDATE HISTOGRAM ON v WITH 4 BUCKETS", "ANALYZE TABLE {t} DROP HISTOGRAM ON v"]),
    "settings_and_roles": Form(["SET PERSIST max_connections = 200", "RESET PERSIST", "CREATE ROLE clerk", "GRANT SELECT ON {t} TO clerk", "DROP ROLE clerk"]),
    "compressed": Form(["SET binlog_transaction_compression=ON", "BEGIN", "INSERT INTO {t} (id, v) VALUES (30, 1), (31, 2)", "UPDATE {t} SET id = id + 10 WHERE id > 29", "COMMIT"]),
    "as_select": Form(["CREATE TABLE shop.made (PRIMARY KEY (id)) AS SELECT * FROM {t}", "INSERT INTO shop.made (id) VALUES (9)"]),
    "atomic_drop": Form(["DROP TABLE {t}, shop.missing"], fails="DROP TABLE {t}, shop.missing"),
    "vector": Form(["ALTER TABLE {t} ADD f VECTOR(2)", "UPDATE {t} SET f = TO_VECTOR('[4,5]') WHERE id = 3"], "id INT PRIMARY KEY, v INT, e VECTOR(3)", "(1, 10, TO_VECTOR('[1,2,3]')), (2, 20, NULL), (3, 30, TO_VECTOR('[-1,0.5,1e9]'))"),
    "json": Form(["UPDATE {t} SET j = JSON_SET(j, '$.a', 5, '$.b', CAST('10:11:12.5' AS TIME(1))) WHERE id = 3"], "id INT PRIMARY KEY, v INT, j JSON", """(1, 10, '{"a": [1, 2.50]}'), (2, 20, 'null'), (3, 30, '{"a": true}')"""),
    "blanks": Form(["INSERT INTO {t} VALUES ('b ', 3)", "UPDATE {t} SET id = 'B  ' WHERE id = 'b'"], "id VARCHAR(9) COLLATE utf8mb4_0900_as_cs PRIMARY KEY, v INT", "('b', 1), ('c', 2)", later=["DELETE FROM {t} WHERE id = 'c'"]),
}  # fmt: skip
"""Statements and columns of MySQL's own; MariaDB would refuse most of them."""
COMMON: Final = (
    "swap",
    "drop_and_add",
    "add_then_rename",
    "drop_and_create",
    "not_null",
    "other_key",
    "only_key",
    "key_and_name",
    "swapped",
)
"""Of the few, those that MySQL has, too."""
READ_AGAIN: Final = frozenset(
    {
        *("partition", "selected", "defaults_untold", "virtual", "vector"),
        *("of_partition", "unique_becomes_key"),
        *_REREAD,
        *_BESIDE,
    }
)
"""The tables that a changefeed must read again; of no other an event is missing."""
FEW: Final = (
    "swap",
    "drop_and_add",
    "add_then_rename",
    "set_statement_truncate",
    "replace_like",
    "drop_and_create",
    "fails_in_two_phases",
    "savepoint_myisam_first",
    "not_null",
    "nulls_in_renamed_key",
    "computed_bytes",
    "implicit_timestamp",
    "unlogged",
    "ghost",
    "other_key",
    "only_key",
    "key_and_name",
    "swapped",
    "defaults",
)
"""One of each kind, for every run."""
