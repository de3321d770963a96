"""The statements that a log of MariaDB 10.6 to 12 or MySQL 8.0 to 9 may hold,
by what is done with each.

The forms are those of both manuals' pages on data definition, account and administrative
statements. The table in docs/design/0029-mysql-schema-tracker.md is made from this file.
"""

from typing import Final

NO_EFFECT: Final = "no effect on data"
UNDERSTOOD: Final = "understood"
READ_AGAIN: Final = "read again"
STOP: Final = "stop"

STATEMENTS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    NO_EFFECT: {
        "CREATE, ALTER, DROP DATABASE (defaults)": (
            "CREATE DATABASE a",
            ("CREATE SCHEMA IF NOT EXISTS a DEFAULT CHARACTER SET = utf8mb4 COLLATE utf8mb4_bin"),
            "ALTER DATABASE a CHARACTER SET utf8mb3",
        ),
        "views, triggers, routines, events, packages, sequences": (
            (
                "CREATE OR REPLACE ALGORITHM=MERGE DEFINER=`r`@`%` SQL SECURITY INVOKER VIEW v AS "
                "SELECT * FROM t"
            ),
            (
                "CREATE DEFINER=CURRENT_USER() TRIGGER tr BEFORE INSERT ON t FOR EACH ROW SET new.a = "
                "1"
            ),
            "CREATE DEFINER=`root`@`localhost` PROCEDURE p() BEGIN DELETE FROM t; TRUNCATE t; END",
            "CREATE AGGREGATE FUNCTION f(x INT) RETURNS INT BEGIN RETURN 1; END",
            "CREATE FUNCTION f RETURNS STRING SONAME 'f.so'",
            "CREATE EVENT e ON SCHEDULE EVERY 1 DAY DO DELETE FROM t",
            "CREATE OR REPLACE PACKAGE BODY p AS END",
            "CREATE SEQUENCE IF NOT EXISTS s START WITH 1 INCREMENT BY 2",
            "ALTER SEQUENCE s RESTART 5",
            "ALTER VIEW v AS SELECT 1",
            "ALTER EVENT e DISABLE",
            "ALTER PROCEDURE p COMMENT 'TRUNCATE TABLE t'",
            "DROP VIEW IF EXISTS v, w",
            "DROP TRIGGER IF EXISTS d.tr",
            "DROP PROCEDURE p",
            "DROP FUNCTION IF EXISTS f",
            "DROP EVENT e",
            "DROP SEQUENCE s",
        ),
        "accounts": (
            "CREATE USER 'a'@'%' IDENTIFIED BY 'x'",
            "ALTER USER 'a'@'%' PASSWORD EXPIRE",
            "DROP USER IF EXISTS 'a'@'%'",
            "RENAME USER a TO b",
            "CREATE ROLE r",
            "DROP ROLE r",
            "GRANT SELECT ON *.* TO x",
            "REVOKE ALL PRIVILEGES, GRANT OPTION FROM x",
            "SET PASSWORD FOR x = 'y'",
            "SET DEFAULT ROLE r FOR x",
            "SET STATEMENT max_statement_time=1 FOR GRANT SELECT ON *.* TO x",
        ),
        "maintenance of tables and of the server": (
            "ANALYZE TABLE t",
            "ANALYZE NO_WRITE_TO_BINLOG TABLE t PERSISTENT FOR ALL",
            "OPTIMIZE LOCAL TABLE t",
            "REPAIR TABLE t QUICK",
            "FLUSH TABLES",
            "PURGE BINARY LOGS TO 'x'",
            "INSTALL PLUGIN p SONAME 'p.so'",
            "UNINSTALL PLUGIN p",
            "CREATE SERVER s FOREIGN DATA WRAPPER mysql OPTIONS (HOST 'h')",
            "DROP SERVER s",
            "CREATE TABLESPACE ts ADD DATAFILE 'ts.ibd' ENGINE=INNODB",
            "ALTER TABLESPACE ts RENAME TO tt",
            "DROP UNDO TABLESPACE u",
            "CREATE LOGFILE GROUP g ADD UNDOFILE 'u'",
            "CREATE RESOURCE GROUP g TYPE=USER",
            "ALTER INSTANCE ROTATE INNODB MASTER KEY",
            "CREATE SPATIAL REFERENCE SYSTEM 1 NAME 'x' DEFINITION 'y'",
        ),
        "temporary tables that are dropped, savepoints that end, comments": (
            "DROP TEMPORARY TABLE IF EXISTS `db`.`tt`",
            "RELEASE SAVEPOINT s",
            "# nothing at all",
            "/* nothing */;",
            "/*!990000 DROP TABLE t */",
        ),
    },
    UNDERSTOOD: {
        "savepoints": ("SAVEPOINT `s`", "ROLLBACK TO `s`", "ROLLBACK WORK TO SAVEPOINT s"),
        "CREATE TABLE": (
            (
                "CREATE TABLE u (id INT PRIMARY KEY, v VARCHAR(10) CHARACTER SET latin1 COLLATE "
                "latin1_bin NOT NULL DEFAULT 'x')"
            ),
            (
                "CREATE TABLE IF NOT EXISTS u (`a b` BIGINT UNSIGNED ZEROFILL NOT NULL AUTO_INCREMENT "
                "UNIQUE KEY COMMENT 'x')"
            ),
            (
                "CREATE TABLE u (id SERIAL, PRIMARY KEY USING BTREE (id DESC), KEY k (v(10)) COMMENT "
                "'c' INVISIBLE, v TEXT)"
            ),
            (
                "CREATE TABLE u (a INT, b INT GENERATED ALWAYS AS (a + 1) VIRTUAL, c INT AS (a * 2) "
                "PERSISTENT, d INT AS (a) STORED)"
            ),
            (
                "CREATE TABLE u (e ENUM('a','b''c'), s SET('x','y') CHARACTER SET utf8mb4, f "
                "FLOAT(7,4), g DOUBLE PRECISION, h DECIMAL(65,30))"
            ),
            (
                "CREATE TABLE u (a NATIONAL VARCHAR(3), b NCHAR(2), c CHAR BYTE, d LONG VARCHAR, f "
                "CHARACTER VARYING(9), g BOOL, h INT1, i MIDDLEINT)"
            ),
            (
                "CREATE TABLE u (a DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE "
                "CURRENT_TIMESTAMP(6), b TIMESTAMP NULL DEFAULT NULL, c TIME(3), d YEAR(4))"
            ),
            (
                "CREATE TABLE u (a UUID DEFAULT uuid(), b INET6, c INET4, j JSON CHECK "
                "(json_valid(j)), v VECTOR(3), p POINT SRID 4326 NOT NULL)"
            ),
            (
                "CREATE TABLE u (a INT REFERENCES p (id) ON DELETE RESTRICT, CONSTRAINT c FOREIGN KEY "
                "f (a) REFERENCES d.p (id) MATCH FULL ON UPDATE NO ACTION)"
            ),
            (
                "CREATE TABLE u (a INT, CONSTRAINT c CHECK (a > 0) NOT ENFORCED, CHECK (a < 9), "
                "UNIQUE INDEX ((a + 1)), FULLTEXT KEY ft (v) WITH PARSER ngram, v TEXT)"
            ),
            (
                "CREATE TABLE u (a INT) ENGINE=InnoDB AUTO_INCREMENT=5 DEFAULT CHARSET=utf8mb4 "
                "COLLATE=utf8mb4_bin ROW_FORMAT=DYNAMIC COMMENT='; DROP TABLE t' STATS_PERSISTENT=1"
            ),
            (
                "CREATE TABLE u (a INT) PAGE_COMPRESSED=1 ENCRYPTED=YES, TABLESPACE ts DATA "
                "DIRECTORY='/x' `custom`=ON"
            ),
            (
                "CREATE TABLE u (a INT) PARTITION BY RANGE (a) (PARTITION p0 VALUES LESS THAN (5) "
                "ENGINE = InnoDB, PARTITION p1 VALUES LESS THAN MAXVALUE)"
            ),
            (
                "CREATE TABLE u (a INT, b INT) PARTITION BY LIST COLUMNS (a) SUBPARTITION BY LINEAR "
                "KEY ALGORITHM=2 (b) SUBPARTITIONS 2 (PARTITION p VALUES IN (1))"
            ),
            "CREATE TABLE u (a INT) PARTITION BY HASH (a) PARTITIONS 4",
            "CREATE TABLE u LIKE d.t",
            "CREATE TABLE u (LIKE t)",
            "CREATE TABLE `u` (\n  `a` int(11) DEFAULT NULL\n) ENGINE=InnoDB START TRANSACTION",
            "CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, v INT)",
            "/*!50001 CREATE /*M!100301 OR REPLACE */ */ TABLE u (a INT)",
            "CREATE /*M!100301 OR REPLACE */ TABLE u (a INT)",
            (
                "CREATE TABLE u (a INT INVISIBLE, b VARCHAR(10) COMPRESSED, c BLOB COMPRESSED=zlib, d "
                "TEXT ASCII, e CHAR(3) BINARY)"
            ),
        ),
        "ALTER TABLE: columns": (
            "ALTER TABLE t ADD COLUMN x INT, DROP COLUMN y",
            "ALTER TABLE t ADD (x INT DEFAULT 1, y INT DEFAULT 2, KEY (x))",
            "ALTER TABLE t ADD COLUMN IF NOT EXISTS x INT FIRST, ADD y INT AFTER x",
            "ALTER TABLE t DROP COLUMN IF EXISTS v RESTRICT",
            "ALTER TABLE t RENAME COLUMN v TO w, RENAME COLUMN w TO v",
            "ALTER TABLE t RENAME COLUMN`v`TO`w`",
            "ALTER TABLE t RENAME COLUMN IF EXISTS V TO w",
            "/* app:1 */ ALTER TABLE t RENAME /* x */ COLUMN v TO w -- end",
            "-- x\nALTER TABLE t RENAME COLUMN v TO w",
            "# x\nALTER TABLE t CHANGE t.v w BIGINT",
            "ALTER ONLINE TABLE t WAIT 5 CHANGE COLUMN IF EXISTS `v` `w` INT AFTER id",
            "ALTER TABLE t NOWAIT MODIFY v BIGINT FIRST, ALGORITHM=INPLACE, LOCK=NONE",
            (
                "ALTER TABLE t ALTER COLUMN v SET DEFAULT 5, ALTER v DROP DEFAULT, ALTER w SET "
                "DEFAULT (uuid())"
            ),
            "ALTER TABLE t ALTER COLUMN v SET INVISIBLE",
            "ALTER TABLE t DROP v, ADD v INT DEFAULT 5",
            "ALTER TABLE t ADD z INT DEFAULT 8 COMMENT 'rename column v to z later'",
            (
                "SET STATEMENT lock_wait_timeout=5, sql_mode=CONCAT('a', 'b') FOR ALTER TABLE t ADD w "
                "INT DEFAULT 5"
            ),
            "/*!50000 ALTER TABLE t CHANGE v w INT */",
        ),
        "ALTER TABLE: keys": (
            "ALTER TABLE t ADD PRIMARY KEY (a, b), DROP PRIMARY KEY",
            (
                "ALTER TABLE t ADD CONSTRAINT c UNIQUE KEY k USING HASH (a), ADD FULLTEXT INDEX (v), "
                "ADD SPATIAL KEY s (p)"
            ),
            (
                "ALTER TABLE t ADD UNIQUE IF NOT EXISTS u (a), DROP INDEX IF EXISTS k, DROP KEY l, "
                "DROP CONSTRAINT c"
            ),
            (
                "ALTER TABLE t RENAME INDEX a TO b, RENAME KEY IF EXISTS c TO d, ALTER INDEX b "
                "INVISIBLE, ALTER KEY d NOT IGNORED"
            ),
            (
                "ALTER TABLE t ADD CONSTRAINT FOREIGN KEY (a) REFERENCES p (id) ON DELETE RESTRICT, "
                "DROP FOREIGN KEY IF EXISTS f"
            ),
            (
                "ALTER TABLE t ADD CONSTRAINT IF NOT EXISTS c CHECK (v > 0), DROP CONSTRAINT IF EXISTS d"
            ),
            (
                "ALTER TABLE t ADD CONSTRAINT c CHECK (v > 0), DROP CHECK d, ALTER CHECK c NOT "
                "ENFORCED"
            ),
            (
                "CREATE UNIQUE INDEX IF NOT EXISTS i USING BTREE ON t (a(5) DESC, (b + 1)) COMMENT "
                "'x' ALGORITHM=INPLACE LOCK=NONE"
            ),
            "CREATE FULLTEXT INDEX i ON t (v)",
            "ALTER TABLE t ADD VECTOR INDEX (v), ADD VECTOR KEY i (v) M=8 DISTANCE=cosine",
            "CREATE VECTOR INDEX IF NOT EXISTS i ON t (v) DISTANCE=euclidean",
            "CREATE OR REPLACE INDEX i ON t (v)",
            "DROP INDEX IF EXISTS i ON a.t WAIT 5 ALGORITHM=COPY",
            "DROP INDEX `PRIMARY` ON t",
        ),
        "ALTER TABLE: the table": (
            "ALTER TABLE t RENAME AS a.u",
            "ALTER TABLE t ADD x INT, RENAME TO u",
            "ALTER TABLE t ENGINE=InnoDB ROW_FORMAT=COMPRESSED KEY_BLOCK_SIZE=8, COMMENT 'x'",
            "ALTER TABLE t DEFAULT CHARACTER SET latin1 COLLATE latin1_bin",
            "ALTER TABLE t FORCE, ORDER BY a DESC, b",
            "ALTER TABLE t DISABLE KEYS",
            "/*!40000 ALTER TABLE `t` ENABLE KEYS */",
            "ALTER TABLE t AUTO_INCREMENT = 100",
            "ALTER TABLE t ADD PARTITION (PARTITION p3 VALUES LESS THAN (9))",
            "ALTER TABLE t ADD PARTITION PARTITIONS 2",
            (
                "ALTER TABLE t REORGANIZE PARTITION p0 INTO (PARTITION a VALUES LESS THAN (3), "
                "PARTITION b VALUES LESS THAN (5))"
            ),
            "ALTER TABLE t COALESCE PARTITION 1",
            "ALTER TABLE t REBUILD PARTITION p0, p1",
            "ALTER TABLE t PARTITION BY KEY () PARTITIONS 4",
            "ALTER TABLE t REMOVE PARTITIONING",
            "ALTER TABLE t SECONDARY_ENGINE=RAPID",
            "ALTER TABLE IF EXISTS t WITHOUT VALIDATION, ADD x INT",
        ),
        "RENAME, DROP, TRUNCATE": (
            "RENAME TABLE IF EXISTS a.b TO a.c, `a`.`d` WAIT 3 TO x.y",
            "RENAME TABLES a TO tmp, b TO a, tmp TO b",
            "TRUNCATE t",
            "TRUNCATE TABLE a.t NOWAIT",
            "SET STATEMENT lock_wait_timeout=5 FOR TRUNCATE TABLE t",
            (
                "SET STATEMENT lock_wait_timeout=0 FOR SET STATEMENT lock_wait_timeout=5 FOR TRUNCATE "
                "TABLE t"
            ),
            "DROP TABLE IF EXISTS `a`.`t`,`c` /* generated by server */",
            "DROP TABLES a, b WAIT 1 CASCADE",
            "SET STATEMENT lock_wait_timeout=5 FOR DROP DATABASE d",
            "DROP SCHEMA IF EXISTS `a-b`",
            "CREATE OR REPLACE DATABASE a DEFAULT CHARACTER SET = utf8mb4",
            "CREATE OR REPLACE SEQUENCE t START WITH 5",
        ),
    },
    READ_AGAIN: {
        "stored values change": (
            "ALTER TABLE t MODIFY v VARCHAR(3)",
            "ALTER TABLE t CONVERT TO CHARACTER SET latin1",
            "ALTER IGNORE TABLE t ADD UNIQUE KEY (v)",
            "ALTER TABLE t ADD n INT AUTO_INCREMENT UNIQUE",
            "ALTER TABLE t ADD g INT AS (v * 2) STORED",
            "ALTER TABLE t ADD d DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6)",
        ),
        "rows move beside the log": (
            "ALTER TABLE t DROP PARTITION IF EXISTS p0, p1",
            "ALTER TABLE t TRUNCATE PARTITION ALL",
            "ALTER TABLE t EXCHANGE PARTITION p WITH TABLE u WITHOUT VALIDATION",
            "ALTER TABLE t CONVERT PARTITION p TO TABLE u",
            "ALTER TABLE t CONVERT TABLE u TO PARTITION p VALUES LESS THAN (9)",
            "ALTER TABLE t DISCARD TABLESPACE",
            "ALTER TABLE t IMPORT PARTITION p TABLESPACE",
            "SET STATEMENT lock_wait_timeout=5 FOR ALTER TABLE t TRUNCATE PARTITION p0",
            "CREATE TABLE u (PRIMARY KEY (id)) AS SELECT * FROM t",
            "CREATE TABLE u SELECT 1",
            "CREATE OR REPLACE TABLE t IGNORE (SELECT 1)",
        ),
    },
    STOP: {
        "rows changed by a statement": (
            "INSERT INTO t VALUES (1)",
            "SET STATEMENT binlog_format=STATEMENT FOR UPDATE t SET v = 50",
            "DELETE FROM t",
            "REPLACE t SELECT 1",
            "(SELECT f())",
            "CALL p()",
            "DO f()",
            "LOAD DATA INFILE '/x.csv' INTO TABLE t",
            "WITH x AS (SELECT 1) DELETE FROM t",
            "CREATE TEMPORARY TABLE t (a INT)",
        ),
        "system versioning, foreign keys that change rows, engines without transactions": (
            "ALTER TABLE t ADD SYSTEM VERSIONING",
            (
                "CREATE TABLE u (a INT, s TIMESTAMP(6) GENERATED ALWAYS AS ROW START, e TIMESTAMP(6) "
                "GENERATED ALWAYS AS ROW END, PERIOD FOR SYSTEM_TIME (s, e)) WITH SYSTEM VERSIONING"
            ),
            "ALTER TABLE c ADD FOREIGN KEY (p) REFERENCES p (id) ON DELETE CASCADE",
            "ALTER TABLE t ENGINE=MyISAM",
        ),
        "not understood": (
            "FROBNICATE TABLE t",
            "ALTER TABLE t FROBNICATE x",
            "ALTER TABLE t ADD x INT FROBNICATE",
            "ALTER TABLE t ADD x FROB",
            "TRUNCATE TABLE t FROBNICATE",
            "DROP TABLE t UNLESS NEEDED",
            "SET @x = f()",
            "ANALYZE UPDATE t SET v = 1",
            "ALTER TABLE t ADD x INT DEFAULT 'no end",
            "ROLLBACK TO",
        ),
    },
}
