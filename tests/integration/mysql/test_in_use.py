"""Statements of migrations and of administrators, each in a schema of its own:
behind all of them, each table equals SELECT.

One capture follows them as they come, once more from the start after it had followed them all, and
once only when all were written: the catalogue is at their end then. There is no dump, so what no
event tells has to be read again by itself.
"""

# ruff: noqa: E501 (statements are shown on one line)

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.flight as fl
import pymysql
import pytest
from pymysql.connections import Connection
from pymysql.cursors import Cursor
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse
from tidemarkpb.v1 import changefeed_pb2 as feedpb

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.lake.memory import MemoryLake
from tests.integration.mysql.lake import Lake
from tests.integration.mysql.selected import columns_of, difference, rows_now, tables_now
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

pytestmark = [pytest.mark.timeout(900), mariadb_only("most of these statements")]

PATIENCE_S: Final = 300.0
END: Final = "the_end"
AWAY: Final = "away"
"""A schema that the changefeed does not take."""
T: Final = "CREATE TABLE t (id INT PRIMARY KEY, v INT, c VARCHAR(20), d DATETIME(3))"
ROWS: Final = "INSERT INTO t VALUES (1, 10, 'a', '2024-01-01 00:00:00.123'), (2, 20, 'B', '2024-02-02'), (3, NULL, NULL, NULL)"
AT_ONCE, AGAIN, LATE = "at once", "again", "late"
"""When a capture follows the statements; `again`: it had followed them all when it was killed."""
PARTITIONED: Final = "CREATE TABLE p (id INT PRIMARY KEY, v INT) PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (3), PARTITION p1 VALUES LESS THAN (10))"
PARTITIONED_ROWS: Final = "INSERT INTO p VALUES (1, 1), (2, 2), (5, 5)"
OTHER: Final = "CREATE TABLE x (id INT PRIMARY KEY, v INT)"
OTHER_ROWS: Final = "INSERT INTO x VALUES (1, 11), (0, 10)"
FAMILY: Final = (
    "CREATE TABLE par (id INT PRIMARY KEY)",
    "CREATE TABLE kid (id INT PRIMARY KEY, p INT, FOREIGN KEY f (p) REFERENCES par (id) ON DELETE CASCADE)",
)
FAMILY_ROWS: Final = ("INSERT INTO par VALUES (1), (2)", "INSERT INTO kid VALUES (10, 1), (20, 2)")
VERSIONED: Final = "CREATE TABLE o (id INT PRIMARY KEY, v INT) WITH SYSTEM VERSIONING"
VERSIONED_ROWS: Final = (
    "SET system_versioning_alter_history=KEEP",
    "INSERT INTO o (id, v) VALUES (5, 1)",
    "UPDATE o SET v = 9",
)
UNLOGGED, LOGGED = "SET sql_log_bin=0", "SET sql_log_bin=1"
LATER: Final = "INSERT INTO t (id) VALUES (4)"
FAILS: Final = "!"
"""Before a statement that the server refuses."""


@dataclass(frozen=True)
class Case:
    """Statements of one session; `made` are there when the changefeed begins,
    `rows` come before the statements.
    """

    statements: Sequence[str]
    made: Sequence[str] = (T,)
    rows: Sequence[str] = (ROWS,)
    read_again: Sequence[str] = ()
    """The tables of which no event tells all."""


def _computed(columns: str, rows: str, statement: str, *, charset: str = "utf8mb4") -> Case:
    """A table `t` whose generated columns are others after the statement."""
    made = f"CREATE TABLE t (id INT PRIMARY KEY, {columns}) CHARSET {charset}"
    return Case([statement], [made], [f"INSERT INTO t (id, c) VALUES {rows}"], ["t"])


def _keyless(*statements: str, key: str = "", name: str = "k") -> Case:
    """A table that cannot be replicated until it is altered."""
    made = f"CREATE TABLE k (id INT{key}, v INT){' ENGINE=MyISAM' if key else ''}"
    again = f"INSERT INTO {name} VALUES (9, 9)"
    return Case([*statements, again], [made], ["INSERT INTO k VALUES (1, 1), (2, 2)"], [name])


CASES: Final[Mapping[str, Case]] = {
    "computed_bytes": _computed("c VARCHAR(20), l INT AS (LENGTH(c)) VIRTUAL", "(1, 'é'), (2, 'x')", "ALTER TABLE t MODIFY c VARCHAR(20) CHARACTER SET utf8mb4", charset="latin1"),
    "computed_converted": _computed("c VARCHAR(20), m CHAR(32) AS (MD5(c)) STORED, l INT AS (LENGTH(c)) VIRTUAL", "(1, 'é'), (2, 'x')", "ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4", charset="latin1"),
    "computed_collation": _computed("c VARCHAR(20), s INT AS (c = 'A') STORED, k INT AS (c = 'A') VIRTUAL", "(1, 'a'), (2, 'A')", "ALTER TABLE t MODIFY c VARCHAR(20) COLLATE utf8mb4_bin"),
    "computed_digits": _computed("c FLOAT, s VARCHAR(60) AS (CONCAT(c)) STORED", "(1, 0.1), (2, 7)", "ALTER TABLE t MODIFY c DOUBLE"),
    "computed_default": _computed("c INT DEFAULT 5, w INT AS (DEFAULT(c) + id) VIRTUAL", "(1, 5), (2, 7)", "ALTER TABLE t ALTER c SET DEFAULT 9"),
    "computed_renamed": Case(["ALTER TABLE t RENAME COLUMN c TO c2", "ALTER TABLE t MODIFY c2 VARCHAR(20) CHARACTER SET utf8mb4"], ["CREATE TABLE t (id INT PRIMARY KEY, c VARCHAR(20) CHARACTER SET latin1, l INT AS (LENGTH(c)) VIRTUAL, s INT AS (LENGTH(c)) STORED)"], ["INSERT INTO t (id, c) VALUES (1, 'é'), (2, 'x')"], ["t"]),
    "computed_of_another": Case(["ALTER TABLE t DROP c, ADD c INT DEFAULT 7", "ALTER TABLE u DROP c, RENAME COLUMN d TO c"], [f"CREATE TABLE {name} (id INT PRIMARY KEY, c INT, d INT, v INT AS (c * 2) VIRTUAL, s INT AS (c * 3) STORED)" for name in "tu"], [f"INSERT INTO {name} (id, c, d) VALUES (1, 1, 5)" for name in "tu"], ["t", "u"]),
    "computed_at_once": Case(["ALTER TABLE t MODIFY c VARCHAR(20) CHARACTER SET utf8mb4, MODIFY s INT AS (LENGTH(c)) STORED"], ["CREATE TABLE o (id INT PRIMARY KEY)"], ["CREATE TABLE t (id INT PRIMARY KEY, c VARCHAR(20) CHARACTER SET latin1, s INT AS (LENGTH(c)) STORED)", "INSERT INTO t (id, c) VALUES (1, 'é'), (2, 'x')"], ["t"]),
    "computed_as_elsewhere": Case(["CREATE TABLE {away}.computed (id INT PRIMARY KEY, c VARCHAR(20) CHARACTER SET latin1, s INT AS (LENGTH(c)) STORED)", "CREATE TABLE n LIKE {away}.computed", "INSERT INTO n (id, c) VALUES (1, 'é')", "ALTER TABLE n MODIFY c VARCHAR(20) CHARACTER SET utf8mb4"], read_again=["n"]),
    "quoted_hex": Case(["ALTER TABLE t ADD x INT DEFAULT X'31', ADD y INT DEFAULT 0x31, ADD z YEAR DEFAULT '000'"], read_again=["t"]),
    "versioned_column": Case(["CREATE TABLE n (id INT PRIMARY KEY, x INT WITH SYSTEM VERSIONING)", "INSERT INTO n VALUES (1, 1)", "UPDATE n SET x = 2"]),
    "timestamp_without_null": Case(["SET explicit_defaults_for_timestamp=OFF", "ALTER TABLE t ADD ts TIMESTAMP, ADD two TIMESTAMP NULL", LATER], read_again=["t"]),
    "timestamp_changed": Case(["SET explicit_defaults_for_timestamp=OFF", "ALTER TABLE t MODIFY ts TIMESTAMP"], ["CREATE TABLE t (id INT PRIMARY KEY, ts TIMESTAMP NULL)"], ["INSERT INTO t VALUES (1, NULL), (2, '2024-01-01')"], ["t"]),
    "timestamp_created": Case(["SET explicit_defaults_for_timestamp=OFF", "CREATE TABLE n (id INT PRIMARY KEY, ts TIMESTAMP)", "INSERT INTO n (id) VALUES (1)"]),
    "timestamp_plain": Case(["ALTER TABLE t ADD ts TIMESTAMP", LATER]),
    "untold_then_told": Case(["ALTER TABLE t MODIFY d DATE, CONVERT TO CHARACTER SET latin1", "ALTER TABLE t MODIFY v DOUBLE", LATER], read_again=["t"]),
    "untold_and_back": Case(["ALTER IGNORE TABLE t MODIFY v BIGINT, CONVERT TO CHARACTER SET latin1", "ALTER IGNORE TABLE t MODIFY v INT, CONVERT TO CHARACTER SET utf8mb4", LATER], read_again=["t"]),
    "schema_default_moves": Case(["ALTER DATABASE CHARACTER SET latin1", "CREATE TABLE m (id INT PRIMARY KEY, c VARCHAR(9), s SET('é'))", "INSERT INTO m VALUES (1, 'é', 'é')", "CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT * FROM m", "ALTER DATABASE CHARACTER SET utf8mb4", "ALTER TABLE t ADD x INT DEFAULT 5", "INSERT INTO t (id, c) VALUES (2, 'ü')"]),
    "unlogged_add": Case([UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", LOGGED, LATER], read_again=["t"]),
    "unlogged_pair": Case([UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", "ALTER TABLE u ADD y INT DEFAULT 6, DROP v", LOGGED, "BEGIN", "INSERT INTO t (id) VALUES (4)", "INSERT INTO u (id) VALUES (4)", "UPDATE t SET x = 9 WHERE id = 4", "COMMIT"], [T, "CREATE TABLE u (id INT PRIMARY KEY, v INT)"], [ROWS, "INSERT INTO u VALUES (1, 1)"], ["t", "u"]),
    "unlogged_rename": Case([UNLOGGED, "ALTER TABLE t RENAME COLUMN v TO w", LOGGED, LATER], read_again=["t"]),
    "unlogged_type": Case([UNLOGGED, "ALTER TABLE t MODIFY v SMALLINT", LOGGED, LATER], read_again=["t"]),
    "unlogged_table": Case([UNLOGGED, "CREATE TABLE n (id INT PRIMARY KEY)", "INSERT INTO n VALUES (1), (2)", LOGGED, "INSERT INTO n VALUES (4)"], read_again=["n"]),
    "key_comes": _keyless("ALTER TABLE k ADD PRIMARY KEY (id)"),
    "key_comes_by_index": _keyless("ALTER TABLE k MODIFY id INT NOT NULL", "CREATE UNIQUE INDEX u ON k (id)"),
    "key_comes_with_a_name": _keyless("ALTER TABLE k ADD PRIMARY KEY (id), RENAME TO k2", name="k2"),
    "engine_comes": _keyless("ALTER TABLE k ENGINE=InnoDB", key=" PRIMARY KEY"),
    "keyless_stays": Case(["ALTER TABLE k ADD x INT", "RENAME TABLE k TO k2", "INSERT INTO k2 VALUES (1, 1)", LATER], [T, "CREATE TABLE k (id INT)"], [ROWS, "INSERT INTO k VALUES (1)"]),
    "sequence_renamed": Case(["CREATE SEQUENCE s1", "RENAME TABLE s1 TO s2", "ALTER TABLE s2 RENAME s3", "INSERT INTO t (id) VALUES (NEXTVAL(s3) + 10)", "DROP TABLE s3"]),
    "view_renamed": Case(["CREATE VIEW w1 AS SELECT 1", "CREATE VIEW w2 AS SELECT 2", "RENAME TABLE w1 TO w0, w2 TO w1, w0 TO w2", LATER]),
    "nothing_renamed": Case(["RENAME TABLE IF EXISTS missing TO other, t TO t9", "ALTER TABLE IF EXISTS missing ADD x INT", "INSERT INTO t9 (id) VALUES (4)"]),
    "period_created": Case(["CREATE TABLE p (id INT, s DATE, e DATE, PERIOD FOR app (s, e), PRIMARY KEY (id, app WITHOUT OVERLAPS))", "INSERT INTO p VALUES (1, '2024-01-01', '2024-12-31')", "DELETE FROM p FOR PORTION OF app FROM '2024-03-01' TO '2024-04-01'"]),
    "period_added": Case(["ALTER TABLE t ADD PERIOD FOR app (d, e), ADD UNIQUE (v, app WITHOUT OVERLAPS)", "ALTER TABLE t ADD x INT DEFAULT 3", "UPDATE t FOR PORTION OF app FROM '2024-02-01' TO '2024-03-01' SET x = 9", "ALTER TABLE t DROP INDEX v, DROP PERIOD FOR app", "UPDATE t SET x = x + 1"], ["CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, v INT, d DATETIME NOT NULL, e DATETIME NOT NULL)"], ["INSERT INTO t (v, d, e) VALUES (1, '2024-01-01', '2024-12-31')"], ["t"]),
    "ghost_beside": Case(["CREATE TABLE {away}._t_gho LIKE t", "ALTER TABLE {away}._t_gho ADD x INT NOT NULL DEFAULT 5", "INSERT INTO {away}._t_gho (id, v, c, d) SELECT * FROM t", "rename /* gh-ost */ table t TO {away}._t_del, {away}._t_gho TO t", LATER], read_again=["t"]),
    "ghost_unique": Case(["CREATE TABLE {away}._t_gho LIKE t", "ALTER TABLE {away}._t_gho ADD UNIQUE u (v)", "INSERT IGNORE INTO {away}._t_gho SELECT * FROM t", "rename /* gh-ost */ table t TO {away}._t_20240101010101_del, {away}._t_gho TO t"], rows=["INSERT INTO t (id, v) VALUES (1, 10), (2, 10)"], read_again=["t"]),
    "ghost_collation": Case(["CREATE TABLE {away}._k_gho LIKE k", "ALTER TABLE {away}._k_gho CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci", "INSERT IGNORE INTO {away}._k_gho SELECT * FROM k", "rename /* gh-ost */ table k TO {away}._k_del, {away}._k_gho TO k"], ["CREATE TABLE k (s VARCHAR(9) COLLATE utf8mb4_bin PRIMARY KEY)"], ["INSERT INTO k VALUES ('a'), ('A')"], ["k"]),
    "ghost_index": Case(["CREATE TABLE {away}._u_gho LIKE u", "ALTER TABLE {away}._u_gho ADD KEY k (v), DROP KEY x, ADD UNIQUE y (v, id)", "INSERT IGNORE INTO {away}._u_gho SELECT * FROM u", "rename /* gh-ost */ table u TO {away}._u_del, {away}._u_gho TO u"], ["CREATE TABLE u (id INT PRIMARY KEY, v INT, UNIQUE x (id, v))"], ["INSERT INTO u VALUES (1, 10), (2, 10)"]),
    "ghost_anew": Case(["CREATE TABLE {away}._w_gho LIKE w", "ALTER TABLE {away}._w_gho DROP v, ADD v INT DEFAULT 5", "INSERT INTO {away}._w_gho (id) SELECT id FROM w", "rename /* gh-ost */ table w to {away}._w_del, {away}._w_gho to w"], ["CREATE TABLE w (id INT PRIMARY KEY, v INT)"], ["INSERT INTO w VALUES (1, 10), (2, 10)"], ["w"]),
    "hand_made": Case(["CREATE TABLE {away}._u_new LIKE u", "INSERT INTO {away}._u_new SELECT id, v + 1 FROM u WHERE id > 1", "RENAME TABLE u TO {away}._u_old, {away}._u_new TO u"], ["CREATE TABLE u (id INT PRIMARY KEY, v INT)"], ["INSERT INTO u VALUES (1, 10), (2, 10)"], ["u"]),
    "reloaded": Case(["CREATE TABLE {away}.fresh LIKE t", "INSERT INTO {away}.fresh (id, v) VALUES (2, 21), (7, 70)", "RENAME TABLE t TO {away}.stale, {away}.fresh TO t", LATER], read_again=["t"]),
    "reloaded_while_empty": Case(["TRUNCATE t", "CREATE TABLE {away}.fresh2 LIKE t", "INSERT INTO {away}.fresh2 (id, v) VALUES (2, 21), (7, 70)", "RENAME TABLE t TO {away}.stale2, {away}.fresh2 TO t", "UPDATE t SET v = 5", "ALTER TABLE t ADD x INT DEFAULT (id * 2)"], read_again=["t"]),
    "cascade_left_out": Case(["ALTER TABLE kid ADD x INT DEFAULT 3", "INSERT INTO kid VALUES (11, 1, 5)", "DELETE FROM par WHERE id = 1"], FAMILY, FAMILY_ROWS),
    "cascade_came": Case(["CREATE TABLE {away}.par (id INT PRIMARY KEY)", "CREATE TABLE {away}.kid (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES {away}.par (id) ON DELETE CASCADE)", "INSERT INTO {away}.par VALUES (1), (2)", "RENAME TABLE {away}.kid TO kid", "INSERT INTO kid VALUES (10, 1), (20, 2)", "DELETE FROM {away}.par WHERE id = 1"]),
    "cascade_ended": Case(["ALTER TABLE kid ADD x INT DEFAULT 3", "INSERT INTO kid VALUES (11, 1, 5)", "DELETE FROM par WHERE id = 1", "ALTER TABLE kid DROP FOREIGN KEY f", "INSERT INTO kid VALUES (12, 1, 5)"], FAMILY, FAMILY_ROWS, ["kid"]),
    "versioned_like": Case(["CREATE TABLE {away}.ver (id INT PRIMARY KEY, v INT) WITH SYSTEM VERSIONING", "CREATE TABLE n LIKE {away}.ver", "INSERT INTO n VALUES (1, 1)", "UPDATE n SET v = 2"]),
    "versioned_left_out": Case(["ALTER TABLE o ADD x INT", "INSERT INTO o (id, v) VALUES (1, 1)", "UPDATE o SET v = 2"], [VERSIONED], VERSIONED_ROWS),
    "versioned_ended": Case(["ALTER TABLE o ADD x INT", "UPDATE o SET v = 2", "ALTER TABLE o DROP SYSTEM VERSIONING", "UPDATE o SET v = 3"], [VERSIONED], VERSIONED_ROWS, ["o"]),
    "mode_of_statement": Case(["SET STATEMENT sql_mode='NO_BACKSLASH_ESCAPES' FOR ALTER TABLE t ADD x VARCHAR(20) DEFAULT 'a\\nb'", "SET STATEMENT sql_mode='ANSI_QUOTES' FOR ALTER TABLE t ADD y VARCHAR(20) DEFAULT \"ab\"", "SET sql_mode='NO_BACKSLASH_ESCAPES'", "SET STATEMENT sql_mode='' FOR ALTER TABLE t ADD z VARCHAR(20) DEFAULT 'a\\nb'", "SET sql_mode=DEFAULT", LATER], read_again=["t"]),
    "mode_of_plain_statement": Case(["SET STATEMENT sql_mode='' FOR ALTER TABLE t ADD x VARCHAR(20) DEFAULT 'ab', ADD y INT", LATER]),
    "oracle_created": Case(["SET sql_mode=ORACLE", "CREATE TABLE n (id NUMBER(9) PRIMARY KEY, d DATE, v VARCHAR2(9), w VARCHAR2(5) BYTE, r RAW(5), c CLOB, b BLOB, n NUMBER, i INTEGER, m mariadb_schema.DATE)", "INSERT INTO n VALUES (1, '2024-01-01 10:11:12', 'é', 'w', 'b', 'c', 'bb', 1.5, 3, '2024-01-01')", "CREATE TABLE n2 AS SELECT * FROM n", "ALTER TABLE n2 ADD PRIMARY KEY (id)", "CREATE TABLE n3 LIKE n", "INSERT INTO n3 SELECT * FROM n"], read_again=["n2"]),
    "oracle_altered": Case(["SET sql_mode=ORACLE", "ALTER TABLE t ADD d2 DATE DEFAULT '2024-01-01 10:11:12', ADD m mariadb_schema.DATE DEFAULT '2024-01-01', ADD q NUMBER DEFAULT 1.5, ADD r NUMBER(7,2) DEFAULT 2.25, MODIFY c VARCHAR2(30)", LATER, "SET sql_mode=DEFAULT", "ALTER TABLE t MODIFY d2 DATETIME, ADD o oracle_schema.DATE DEFAULT '2024-01-02 01:02:03'"]),
    "oracle_empty": Case(["SET sql_mode='ORACLE,EMPTY_STRING_IS_NULL'", "ALTER TABLE t ADD e VARCHAR(9) DEFAULT '', ADD f VARCHAR(9) DEFAULT 'x'", LATER]),
    "replace_failed": Case([f"{FAILS}CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT 1 AS id UNION ALL SELECT 1"]),
    "replace_failed_in_transaction": Case(["BEGIN", "INSERT INTO t (id) VALUES (4)", f"{FAILS}CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT 1 AS id UNION ALL SELECT 1", "COMMIT"]),
    "replace_failed_and_made": Case([f"{FAILS}CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT 1 AS id UNION ALL SELECT 1", "CREATE TABLE t (id INT PRIMARY KEY, z INT)", LATER]),
    "ignored": Case(["ALTER IGNORE TABLE t PARTITION BY LIST (id) (PARTITION p VALUES IN (1, 3, 4))", LATER, "SET check_constraint_checks=0", "INSERT INTO u VALUES (5)", "SET check_constraint_checks=1", "ALTER IGNORE TABLE u COMMENT='x', ALGORITHM=COPY"], [T, "CREATE TABLE u (id INT PRIMARY KEY CHECK (id > 7))"], [ROWS, "INSERT INTO u VALUES (8)"], ["t", "u"]),
    "exchange": Case(["ALTER TABLE p EXCHANGE PARTITION p0 WITH TABLE x","UPDATE p SET v=v+100","UPDATE x SET v=v+1000"],[PARTITIONED,OTHER],[PARTITIONED_ROWS,OTHER_ROWS], read_again=["p", "x"]),
    "convert_out": Case(["ALTER TABLE p CONVERT PARTITION p0 TO TABLE y","UPDATE p SET v=v+100","UPDATE y SET v=v+1000"],[PARTITIONED],[PARTITIONED_ROWS], read_again=["p", "y"]),
    "convert_in": Case(["ALTER TABLE p DROP PARTITION p1","ALTER TABLE p CONVERT TABLE x TO PARTITION p9 VALUES LESS THAN (100)","UPDATE p SET v=v+100"],[PARTITIONED,OTHER],[PARTITIONED_ROWS,"INSERT INTO x VALUES (20,1),(21,2)"], read_again=["p"]),
    "partitions": Case(["ALTER TABLE t PARTITION BY HASH(id) PARTITIONS 3","ALTER TABLE t COALESCE PARTITION 1","ALTER TABLE t REBUILD PARTITION ALL","ALTER TABLE t ADD PARTITION PARTITIONS 2","ALTER TABLE t REMOVE PARTITIONING","UPDATE t SET v=7"]),
    "sequence_default": Case(["CREATE SEQUENCE s1","ALTER TABLE t ADD n INT DEFAULT NEXTVAL(s1)","INSERT INTO t (id) VALUES (7)"], read_again=["t"]),
    "temp_rename": Case(["CREATE TEMPORARY TABLE tmpa (id INT PRIMARY KEY)","INSERT INTO tmpa VALUES (1)","RENAME TABLE tmpa TO tmpb","DROP TABLE tmpb",LATER]),
    "latin1_names": Case(["SET NAMES latin1","ALTER TABLE t ADD `é` INT DEFAULT 5, ADD z VARCHAR(9) DEFAULT 'é'","INSERT INTO t (id) VALUES (8)","SET NAMES utf8mb4"]),
    "poor_connection": Case(["SET character_set_connection=latin1", "ALTER TABLE t ADD z VARCHAR(9) DEFAULT '日é'"], read_again=["t"]),
    "no_backslash": Case(["SET sql_mode='NO_BACKSLASH_ESCAPES'","ALTER TABLE t ADD z VARCHAR(9) DEFAULT 'a\\', ADD y INT DEFAULT 7 COMMENT 'it\\'","INSERT INTO t (id) VALUES (8)","SET sql_mode=DEFAULT"]),
    "generated_in_utf8": Case(["SET NAMES latin1", "CREATE OR REPLACE TABLE `é` (PRIMARY KEY (id)) AS SELECT 9 AS id, 1 AS v", f"{FAILS}CREATE OR REPLACE TABLE `ü` (PRIMARY KEY (id)) AS SELECT 1 AS id UNION ALL SELECT 1", "SET NAMES utf8mb4"], ["CREATE TABLE `Ã©` (id INT PRIMARY KEY, v INT)", "CREATE TABLE `Ã¼` (id INT PRIMARY KEY, v INT)"], ["INSERT INTO `Ã©` VALUES (1, 1), (2, 2)", "INSERT INTO `Ã¼` VALUES (1, 1)"]),
    "procedure": Case(["CREATE PROCEDURE pp() BEGIN ALTER TABLE t ADD x INT DEFAULT 4; UPDATE t SET x=id; ALTER TABLE t RENAME COLUMN x TO y; INSERT INTO t (id) VALUES (9); END","CALL pp()"]),
    "wait": Case(["ALTER TABLE t WAIT 5 ADD x INT DEFAULT 3","CREATE INDEX i ON t (x) WAIT 4","DROP INDEX i ON t","OPTIMIZE TABLE t WAIT 1","RENAME TABLE t WAIT 3 TO t2","RENAME TABLE t2 TO t","INSERT INTO t (id) VALUES (8)","CREATE TABLE z (id INT PRIMARY KEY)","DROP TABLE z NOWAIT","CREATE TABLE z (id INT PRIMARY KEY)","INSERT INTO z VALUES (1)","TRUNCATE TABLE z WAIT 2"]),
    "domain": Case(["SET gtid_domain_id=7",LATER,"ALTER TABLE t ADD x INT DEFAULT 3","SET gtid_domain_id=0","INSERT INTO t (id) VALUES (8)"]),
    "other_server": Case(["SET server_id=99",LATER,"UPDATE t SET v=99","SET server_id=1","INSERT INTO t (id) VALUES (8)"]),
    "skip_repl": Case(["SET skip_replication=1",LATER,"ALTER TABLE t ADD x INT DEFAULT 3","SET skip_replication=0","INSERT INTO t (id) VALUES (8)"]),
    "implicit": Case(["BEGIN","INSERT INTO t (id) VALUES (8)","CREATE TABLE z (id INT PRIMARY KEY)","INSERT INTO t (id) VALUES (9)","ROLLBACK","SET autocommit=0","INSERT INTO z VALUES (1)","ALTER TABLE t ADD x INT DEFAULT 3","INSERT INTO z VALUES (2)","ROLLBACK","SET autocommit=1"]),
    "replaced_away": Case(["CREATE OR REPLACE DATABASE in_replaced_away CHARACTER SET latin1", "CREATE TABLE in_replaced_away.u (id INT PRIMARY KEY, c VARCHAR(9))", "INSERT INTO in_replaced_away.u VALUES (1, 'é')"]),
    "replaced_by_sequence": Case(["CREATE OR REPLACE SEQUENCE t", "CREATE TABLE u (id INT PRIMARY KEY)"]),
    "replaced_database": Case(["CREATE OR REPLACE DATABASE in_replaced_database","CREATE TABLE in_replaced_database.t (id INT PRIMARY KEY, z INT)","INSERT INTO in_replaced_database.t VALUES (1,1)"]),
    "key_types": Case(["ALTER TABLE t MODIFY id BIGINT","ALTER TABLE t CHANGE id id VARCHAR(10)","UPDATE t SET id='1 ' WHERE id='1'","UPDATE t SET v=77 WHERE id='2'"], read_again=["t"]),
    "invisible": Case(["ALTER TABLE t MODIFY v INT INVISIBLE, ADD z INT INVISIBLE DEFAULT 3","INSERT INTO t (id) VALUES (8)","INSERT INTO t VALUES (9,'c',NULL)"]),
    "real_as_float": Case(["SET sql_mode='REAL_AS_FLOAT'","CREATE TABLE n (id INT PRIMARY KEY, r REAL)","INSERT INTO n VALUES (1,0.1)","ALTER TABLE t ADD r REAL DEFAULT 0.1","INSERT INTO t (id,r) VALUES (8,0.3)","SET sql_mode=DEFAULT","ALTER TABLE t ADD r2 REAL DEFAULT 0.1"]),
    "old_mode": Case(["SET old_mode=''","CREATE TABLE n (id INT PRIMARY KEY, c VARCHAR(10) CHARACTER SET utf8)","INSERT INTO n VALUES (1,'😀')","ALTER TABLE t ADD u VARCHAR(9) CHARACTER SET utf8 DEFAULT '😀'","INSERT INTO t (id,u) VALUES (8,'😀')","SET old_mode=DEFAULT"], read_again=["t"]),
    "synonyms": Case(["ALTER TABLE t ADD a NATIONAL VARCHAR(5) DEFAULT 'é', ADD b LONG VARCHAR, ADD b2 LONG VARBINARY, ADD e INT1 DEFAULT 1, ADD f INT8 DEFAULT 8, ADD g MIDDLEINT DEFAULT 3, ADD h FLOAT4 DEFAULT 0.5, ADD i FLOAT8 DEFAULT 0.1, ADD j CHARACTER VARYING(4) DEFAULT 'x', ADD k DEC(7) DEFAULT 2.5, ADD l FIXED DEFAULT 3, ADD m BOOL DEFAULT TRUE, ADD n CHAR BYTE DEFAULT 'y', ADD o TEXT(100) DEFAULT 'tt', ADD p BLOB(70000), ADD q FLOAT(30) DEFAULT 0.1, ADD r BIT DEFAULT b'1', ADD s YEAR(4) DEFAULT 99, ADD u NATIONAL VARCHAR(5) DEFAULT N'é', ADD w DOUBLE PRECISION DEFAULT 1e3, ADD x NUMERIC DEFAULT (-(5))","INSERT INTO t (id) VALUES (8)"], read_again=["t"]),
    "too_long": Case(["SET sql_mode=''","ALTER TABLE t ADD a VARCHAR(70000) CHARACTER SET latin1, ADD b VARBINARY(70000), ADD z INT DEFAULT 3","INSERT INTO t (id,a,b) VALUES (8,REPEAT('x',66000),REPEAT('y',66000))","CREATE TABLE n (id INT PRIMARY KEY, c VARCHAR(30000) CHARACTER SET utf8mb4)","INSERT INTO n VALUES (1,'é')","SET sql_mode=DEFAULT"]),
    "table_charset": Case(["ALTER TABLE t DEFAULT CHARACTER SET latin1","ALTER TABLE t ADD c2 VARCHAR(9) DEFAULT 'é'","INSERT INTO t (id) VALUES (8)","ALTER TABLE t CHARSET utf8mb4 COLLATE utf8mb4_bin, ADD c3 VARCHAR(9) DEFAULT 'é'","INSERT INTO t (id) VALUES (9)"]),
    "literals": Case(["ALTER TABLE t ADD a VARCHAR(9) DEFAULT 'a' 'b', ADD b VARCHAR(9) DEFAULT _latin1'x', ADD e VARCHAR(9) DEFAULT X'4142', ADD f INT DEFAULT 0x41, ADD g DATE DEFAULT DATE'2024-01-01', ADD h INT DEFAULT .5, ADD i INT DEFAULT '7', ADD j DECIMAL(5,2) DEFAULT '1.255', ADD k TIME DEFAULT TIME'10:11:12', ADD l DATETIME(3) DEFAULT TIMESTAMP'2024-01-01 10:11:12.5'","INSERT INTO t (id) VALUES (8)"]),
    "trigger": Case(["CREATE TRIGGER tr AFTER INSERT ON t FOR EACH ROW INSERT INTO x VALUES (NEW.id+100, 1)","INSERT INTO t (id) VALUES (8)","ALTER TABLE x ADD z INT DEFAULT 4","DROP TRIGGER tr",LATER],[T,OTHER],[ROWS,OTHER_ROWS]),
    "uuid_col": Case(["ALTER TABLE t ADD u UUID DEFAULT '018f0000-0000-7000-8000-0000000000ff', ADD i4 INET4 DEFAULT '1.2.3.4', ADD i6 INET6 DEFAULT '::1'","INSERT INTO t (id) VALUES (8)","ALTER TABLE t MODIFY u BINARY(16)","ALTER TABLE t MODIFY i6 VARCHAR(40)"], read_again=["t"]),
    "rename_dance": Case(["RENAME TABLE t TO a1, x TO t","RENAME TABLE t TO x, a1 TO t","ALTER TABLE t RENAME TO x2, ADD q INT DEFAULT 3","CREATE TABLE t LIKE x2","INSERT INTO t (id) VALUES (1)","ALTER TABLE x2 RENAME AS x3","DROP TABLE t","RENAME TABLE x3 TO t",LATER],[T,OTHER],[ROWS,OTHER_ROWS]),
    "away_and_back": Case(["RENAME TABLE t TO {away}.tt1","UPDATE {away}.tt1 SET v=5","ALTER TABLE {away}.tt1 ADD q INT DEFAULT 9","RENAME TABLE {away}.tt1 TO t",LATER], read_again=["t"]),
    "comment_forms": Case(["ALTER/*c*/TABLE/*!*/t/*! ADD x INT DEFAULT 3*/","ALTER TABLE t /*M!100000 ADD y INT DEFAULT 4 */","ALTER TABLE t /*M!999999 DROP y, */ ADD z INT DEFAULT 5","ALTER TABLE t /*!999999 DROP z, */ ADD z2 INT DEFAULT 6","ALTER TABLE t ADD k INT DEFAULT 1 -- DROP v\n, ADD l INT DEFAULT 2 # tail",LATER]),
    "weird_ws": Case(["\tALTER\n\rTABLE\f`t`\vADD\n`x y` INT\nDEFAULT\n3","ALTER TABLE t ADD `a``b` INT DEFAULT 4, ADD `select` INT DEFAULT 5, ADD `ALTER TABLE t DROP v` INT DEFAULT 6",LATER]),
    "convert_members": Case(["SET sql_mode=''", "ALTER TABLE m CONVERT TO CHARACTER SET latin1"], ["CREATE TABLE m (id INT PRIMARY KEY, e ENUM('x','é'), s SET('ö','w')) CHARSET utf8mb4"], ["INSERT INTO m VALUES (1, 'é', 'ö'), (2, 'x', 'w')"], ["m"]),
    "convert_key": Case(["ALTER TABLE k CONVERT TO CHARACTER SET latin1","INSERT INTO k VALUES ('ü',3)","ALTER TABLE k MODIFY s VARCHAR(10) COLLATE latin1_bin","INSERT INTO k VALUES ('A',4)"],["CREATE TABLE k (s VARCHAR(10) CHARACTER SET utf8mb4 PRIMARY KEY, v INT)"],["INSERT INTO k VALUES ('é',1),('a',2)"], read_again=["k"]),
}  # fmt: skip
"""What was once wrong in silence, stopped a changefeed for no reason, or easily might."""


def _run(connection: "Connection[Cursor]", statements: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            sql = statement.removeprefix(FAILS).replace("{away}", AWAY)
            refused = pytest.raises(pymysql.Error)
            with refused if statement.startswith(FAILS) else contextlib.nullcontext():
                cursor.execute(sql)


@contextlib.contextmanager
def _written(server: MariaDb, cluster: Cluster, when: str) -> Iterator[MemoryLake]:
    """All cases are written; the lake follows from the start of the changefeed."""
    server.execute(f"CREATE DATABASE {AWAY}")
    for name, case in CASES.items():
        server.execute(f"CREATE DATABASE in_{name}")
        server.execute(*case.made, database=f"in_{name}")
    request = feedpb.CreateChangefeedRequest(
        id="f",
        sink_uri="flight://",
        source_uri=f"{server.uri}?idle-row-ms=300",
        filter=["in_*.*"],
        ignore_ineligible_table=True,
    )
    start_ts = cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts
    if when == LATE:
        cluster.api("PauseChangefeed", feedpb.PauseChangefeedRequest(id="f"))
    endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
    lake = MemoryLake(
        Changefeed(parse({"endpoint": endpoint, "changefeed": "f", "cuts": "true"})), start_ts
    )
    for name, case in CASES.items():
        with contextlib.closing(server.connect(f"in_{name}")) as connection:
            _run(connection, [*case.rows, *case.statements])
    server.execute(f"CREATE TABLE {END} (id INT PRIMARY KEY)", database=f"in_{name}")
    server.execute(f"INSERT INTO {END} VALUES (1)", database=f"in_{name}")
    if when == AGAIN:
        deadline = time.monotonic() + PATIENCE_S
        while END not in str(cluster.cli("changefeed", "history", "-c", "f")):
            assert time.monotonic() < deadline, "the log is not followed to its end"
        # What was not acknowledged is pulled again, from the start.
        cluster.capture.kill()
        cluster.capture.start()
    if when == LATE:
        cluster.api("ResumeChangefeed", feedpb.ResumeChangefeedRequest(id="f"))
    yield lake


def _wrong(server: MariaDb, lake: MemoryLake) -> dict[str, str]:
    """What is not as the server has it, by table."""
    wrong, found = {}, dict(lake.target.tables)
    with contextlib.closing(server.connect()) as connection:
        for name in CASES:
            for last, table in tables_now(connection, server.port, f"in_{name}").items():
                mine = found.pop(f"in_{name}.{last}", None)
                if mine is None:
                    wrong[f"{name}.{last}"] = "it is missing"
                elif why := difference(
                    list(mine.rows.values()),
                    rows_now(connection, table, columns_of(table.mounter.schema)),
                    tuple(table.mounter.key_columns),
                ):
                    wrong[f"{name}.{last}"] = why
    return wrong | dict.fromkeys(found, "it is there")


@pytest.mark.parametrize("when", [AT_ONCE, pytest.param(AGAIN, marks=pytest.mark.nightly), LATE])
def test_behind_statements_in_use_tables_equal_select(tmp_path: Path, when: str) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        with _written(server, cluster, when) as lake:
            end = f"in_{list(CASES)[-1]}.{END}"
            deadline = time.monotonic() + PATIENCE_S
            while end not in lake.target.tables or not lake.target.tables[end].rows:
                assert time.monotonic() < deadline, f"the end does not come: {lake.at_ts}"
                lake.follow()
        status = cluster.cli("changefeed", "dumpstatus", "-c", "f")["status"]
        assert _wrong(server, lake) == {}
    assert not lake.target.doubled
    assert {each["table"] for each in status if each.get("reason")} == {
        f"in_{name}.{table}" for name, case in CASES.items() for table in case.read_again
    }


def test_a_flush_in_a_transaction_does_not_part_the_changes_of_a_row(tmp_path: Path) -> None:
    """The server gives the table another number then."""
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=server.uri, filter=["a.*"]
        )
        start_ts = cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts
        lake = Lake(cluster, "f", start_ts)
        with contextlib.closing(server.connect("a")) as connection:
            for statements in (
                ["BEGIN", "INSERT INTO t VALUES (34, 1), (5, 1)"],
                ["UPDATE t SET id = 35 WHERE id = 34", "DELETE FROM t WHERE id = 5"],
                ["INSERT INTO t VALUES (5, 2)", "UPDATE t SET v = 3 WHERE id = 35"],
            ):
                _run(connection, statements)
                server.execute("FLUSH TABLES")
            _run(connection, ["COMMIT", "INSERT INTO t VALUES (99, 9)"])
        lake.follow(lambda tables: 99 in tables.get("a.t", {}))
    assert {key: row["v"] for key, row in lake.tables["a.t"].items()} == {35: 3, 5: 2, 99: 9}


def test_a_statement_that_is_not_understood_stops_before_a_new_table(tmp_path: Path) -> None:
    """Its rows may be in no event, whichever names it has."""
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=server.uri, filter=["a.*"]
        )
        cluster.api("CreateChangefeed", request)
        with contextlib.closing(server.connect("a")) as connection:
            _run(
                connection,
                [
                    "SET binlog_format=MIXED",
                    "CREATE TABLE n (id INT PRIMARY KEY, e ENUM(0x61)) AS SELECT 1 AS id",
                ],
            )
        query = feedpb.QueryChangefeedRequest(id="f")
        deadline = time.monotonic() + PATIENCE_S
        while not (error := cluster.api("QueryChangefeed", query).changefeed.error).code:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert error.code.removeprefix("TM:") == "ErrMySQLDDLUnknown"
    assert "may make a table that the changefeed takes" in error.message


def _follow(lake: Lake, seconds: float, is_there: Callable[[], bool]) -> None:
    """Cuts come until it is so."""
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, f"not at {lake.at_ts}: {lake.tables}"
        with contextlib.suppress(fl.FlightServerError):  # it has failed, or is about to go on
            lake.follow(_once())


def _once() -> Callable[[object], bool]:
    looks = iter((False, True))
    return lambda _: next(looks, True)


@pytest.mark.parametrize(
    ("statements", "rows"),
    [
        (
            ["SET sql_mode=''", "ALTER TABLE t MODIFY v INT NOT NULL"],
            [{"id": 1, "v": 0}, {"id": 2, "v": 2}],
        ),
        (
            [UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", LOGGED, "INSERT INTO t VALUES (3, 3, 3)"],
            [{"id": 1, "v": None, "x": 5}, {"id": 2, "v": 2, "x": 5}, {"id": 3, "v": 3, "x": 3}],
        ),
    ],
)  # fmt: skip
def test_where_what_is_unclear_stops_the_printed_dump_and_resume_go_on(
    tmp_path: Path, statements: list[str], rows: list[dict[str, int]]
) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)",
            "INSERT INTO a.t VALUES (1, NULL), (2, 2)",
        )
        uri = f"{server.uri}?idle-row-ms=300&on-unclear-ddl=stop"
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=uri, filter=["a.*"]
        )
        lake = Lake(cluster, "f", cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts)
        cluster.cli("changefeed", "dumpstart", "-c", "f")

        def dumped() -> bool:
            return bool(cluster.cli("changefeed", "dumpstatus", "-c", "f")["state"] == "finished")

        def failed() -> bool:
            query = feedpb.QueryChangefeedRequest(id="f")
            state = cluster.api("QueryChangefeed", query).changefeed.state
            return bool(state == feedpb.CHANGEFEED_STATE_FAILED)

        _follow(lake, PATIENCE_S, dumped)
        server.execute(*statements, database="a")
        _follow(lake, PATIENCE_S, failed)
        cluster.cli("changefeed", "dumpstart", "-c", "f", "--table", "a.t")
        cluster.cli("changefeed", "resume", "-c", "f")
        _follow(
            lake,
            PATIENCE_S,
            lambda: sorted(lake.tables["a.t"].values(), key=lambda row: row["id"]) == rows,
        )
        assert not failed()
