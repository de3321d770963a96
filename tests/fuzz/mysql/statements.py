"""Random statements of several sessions against the tables of one life: what people run,
in odd spelling, and worse.

A step is a text, so that a list of them can be kept, shrunk and run again: `N: SQL` is session N's,
`!…` is something that happens to daemons.
"""

# ruff: noqa: E501 (statements are shown on one line)

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

TABLES: Final = ("t0", "t1", "t2", "T x")
SESSIONS: Final = 3
NAMES: Final = ("a", "b", "c", "d", "Fg", "h i", "drop")
KEYS: Final = 40
"""Values of the key are below that, so that statements meet each other's rows."""
FAMILIES: Final = (
    ("TINYINT", "SMALLINT", "INT", "BIGINT"),
    ("DECIMAL(8,2)", "DECIMAL(10,2)", "DECIMAL(12,2)"),
    ("VARCHAR(5)", "VARCHAR(20)", "VARCHAR(200)", "VARCHAR(20) CHARACTER SET latin1", "CHAR(6)", "TEXT",
     "VARCHAR(30) CHARSET utf8mb3 COLLATE utf8mb3_bin", "MEDIUMTEXT"),
    ("DATETIME", "DATETIME(3)", "DATETIME(6)"),
    ("DATE",),
    ("TIMESTAMP NULL", "TIMESTAMP(6) NULL"),
    ("TIME", "TIME(2)"),
    ("DOUBLE",),
    ("FLOAT",),
    ("VARBINARY(9)", "VARBINARY(30)", "BLOB"),
    ("ENUM('x','y')", "ENUM('x','y','Z z')", "ENUM('y','x')"),
    ("SET('p','q')", "SET('p','q','r')", "SET('q','p')"),
    ("INT UNSIGNED", "BIGINT UNSIGNED"),
    ("BIT(5)", "BIT(12)"),
    ("YEAR",),
    ("MEDIUMINT UNSIGNED",),
    ("UUID",),
    ("INET6",),
    ("INET4",),
    ("POINT",),
    ("GEOMETRY",),
    ("JSON",),
    ("BINARY(6)",),
)  # fmt: skip
"""Within one of them all targets can follow a change of type;
between two a stop by name is right.
"""


def family_of(declared: str) -> int | None:
    """That of a column's type, as information_schema has it; None: it is in none."""
    word, unsigned = (
        re.split(r"[^a-z]", declared.lower(), maxsplit=1)[0],
        "unsigned" in declared.lower(),
    )
    for number, family in enumerate(FAMILIES):
        if any(
            re.split(r"\W", each.lower())[0] == word and ("UNSIGNED" in each) == unsigned
            for each in family
        ):
            return number
    return None


VALUES: Final = (
    "1", "0", "NULL", "-3", "120", "70000", "'x'", "'y'", "'p,q'", "'abcdef  '", "'2024-01-02 03:04:05.678'", "'é日'",
    "1.25", "X'4100'", "'10:11:12.5'", "'18446744073709551615'", "'2024-02-29'", "'it''s'", "DEFAULT", "'it\\\\s'",
    "CURRENT_TIMESTAMP", "b'101'", "'  '", "REPEAT('k', 300)", "'0000-00-00'", "'2024-00-00'", "'-838:59:59'", "'😀'",
    "0.1", "-1e10", "9223372036854775808", "UUID()", "'::1'", "'10.0.0.1'", "POINT(1, 2)", "'{\"a\": [1, \"ü\"]}'",
)  # fmt: skip
DEFAULTS: Final = ("5", "-5", "0", "1.55", "'7'", "'x'", "'p,q'", "NULL", "'2024-01-01'", "'2024-01-01 10:00:00.5'",
                   "'é'", "'it''s'", "(1 + 1)", "CURRENT_TIMESTAMP", "0x41", "TRUE")  # fmt: skip
SETTINGS: Final = (
    "SET sql_mode=''", "SET sql_mode=''", "SET sql_mode='STRICT_TRANS_TABLES'", "SET sql_mode='ANSI_QUOTES'",
    "SET sql_mode='NO_BACKSLASH_ESCAPES'", "SET sql_mode='STRICT_ALL_TABLES,NO_ZERO_DATE'", "SET time_zone='+05:30'",
    "SET time_zone='-11:00'", "SET time_zone='+00:00'", "SET NAMES latin1", "SET NAMES utf8mb4", "SET NAMES cp1251",
    # Never both at once: MariaDB then undoes a transaction by a failed INSERT, and logs its rows.
    "SET foreign_key_checks=0, unique_checks=1", "SET foreign_key_checks=1", "SET unique_checks=0, foreign_key_checks=1",
    "SET binlog_alter_two_phase=ON",
    "SET binlog_alter_two_phase=OFF", "SET autocommit=0", "SET autocommit=1", "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET sql_mode='PAD_CHAR_TO_FULL_LENGTH'", "SET collation_connection=latin1_german1_ci", "SET insert_id=77",
)  # fmt: skip
HAZARDS: Final = (
    "statement",
    "savepoint",
    "type",
    "key",
    "engine",
    "cascade",
    "temporary",
    "image",
)
"""What a named stop may answer; most lives have none of them, so that they last."""
CHARACTERS: Final = (
    ("big5", "宏碁"), ("gbk", "誠中"), ("cp932", "表ソ①"), ("sjis", "表ソ"), ("ujis", "日本\ue000"), ("euckr", "한국"),
    ("latin1", "€ÿ"), ("cp1251", "Ёж"), ("utf16", "é😀"), ("koi8u", "їж"), ("greek", "αβ"), ("ucs2", "日"),
)  # fmt: skip
"""Character sets, and letters of each that are easily read wrongly."""
PLAIN: Final = "CREATE TABLE"
DAEMONS: Final = ("!pause", "!kill capture", "!kill server", "!dump", "!rotate", "!settle")


@dataclass
class Writer:
    """Makes steps; `columns` are the tables of the life as they are now: names of columns,
    and generated ones.
    """

    random: random.Random
    schema: str
    outside: str
    hazards: frozenset[str]
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _script: list[str] = field(default_factory=list)
    """Steps that only mean something one after the other."""
    types: dict[str, int] = field(default_factory=dict)
    """The family that a column of a name has, by table and name, as it was last given."""

    def begin(self) -> list[str]:
        """The tables, and what stands beside them."""
        steps = [self._create(name) for name in TABLES[:3]]
        out = self.outside
        steps += [
            f"CREATE TABLE {out}.plain (id INT PRIMARY KEY, v INT)",
            f"CREATE TABLE {out}.my (id INT PRIMARY KEY, v INT) ENGINE=MyISAM",
            f"CREATE TABLE {out}.aria (id INT PRIMARY KEY, v INT) ENGINE=Aria",
            f"CREATE TABLE {out}.log_of (id INT PRIMARY KEY, v INT)",
            f"CREATE OR REPLACE VIEW {out}.view_of AS SELECT id FROM {self.schema}.t0",
            (
                f"CREATE TRIGGER {out}.moves AFTER INSERT ON {out}.log_of FOR EACH ROW REPLACE INTO "
                f"{self.schema}.t1 (id) VALUES (NEW.id)"
            ),
            (
                f"CREATE FUNCTION {out}.makes(k INT) RETURNS INT MODIFIES SQL DATA BEGIN REPLACE INTO "
                f"{self.schema}.t0 (id) VALUES (k); RETURN k; END"
            ),
            (
                f"CREATE PROCEDURE {out}.does(k INT) BEGIN DELETE FROM {self.schema}.t1 WHERE id = k; "
                f"REPLACE INTO {self.schema}.t1 (id) VALUES (k + 1); END"
            ),
        ]
        steps += [
            f"INSERT INTO {name} (id) VALUES ({', '.join(map(str, range(6)))})".replace(
                ", ", "), ("
            )
            for name in TABLES[:3]
        ]
        return [f"0: {step}" for step in steps]

    def step(self) -> str:
        """One more."""
        if self._script:
            return self._script.pop(0)
        dice = self.random.random()
        session = self.random.randrange(SESSIONS)
        if dice < 0.016:
            return self.random.choice(DAEMONS)
        if dice < 0.06:
            return f"{session}: {self.random.choice(SETTINGS)}"
        if dice < 0.11 and self.hazards:
            return self._hazardous(session)
        if len(self.columns) < 2 and dice < 0.5:  # statements have nothing to do without tables
            return f"{session}: {self._create(self.random.choice(TABLES))}"
        if dice < 0.14:
            return self._first_of(session, self._sequence(session))
        if dice < 0.27:
            return f"{session}: {self._spelt(self._ddl())}"
        if dice < 0.40:
            return f"{session}: {self._transaction()}"
        if dice < 0.48:
            return f"{session}: {self._beside()}"
        return f"{session}: {self._spelt(self._dml())}"

    def _first_of(self, session: int, steps: Sequence[str]) -> str:
        """The first of some statements of a session; the others are the next steps."""
        self._script = [f"{session}: {step}" for step in steps]
        return self._script.pop(0)

    def _hazardous(self, session: int) -> str:
        if "savepoint" in self.hazards and self.random.random() < 0.5:
            return self._first_of(session, self._undone())
        return f"{session}: {self._hazard()}"

    def _sequence(self, session: int) -> Sequence[str]:
        """What people do with several statements: keys that change places, tables that take others'
        places, with their rows or without, partitions that are exchanged.
        """
        name, out, key = self._table(), self.outside, self._key()
        table, two = self._quoted(name), self._quoted(self._table())
        column, new = self._column(name), self._quoted(self.random.choice(NAMES))
        ended = self.random.choice(("COMMIT", "COMMIT", "ROLLBACK"))
        charset, text = self.random.choice(CHARACTERS)
        made: Callable[[], Sequence[str]] = self.random.choice(
            (
                lambda: ["BEGIN", f"UPDATE {table} SET id = -1 WHERE id = {key}", f"UPDATE {table} SET id = {key} WHERE id = {key + 1}",
                         f"UPDATE {table} SET id = {key + 1} WHERE id = -1", ended],
                lambda: ["BEGIN", f"DELETE FROM {table} WHERE id = {key}", f"INSERT INTO {table} (id) VALUES ({key})",
                         f"UPDATE {table} SET id = {key + 3} WHERE id = {key}", f"REPLACE INTO {table} (id) VALUES ({key})", ended],
                lambda: ["BEGIN", f"INSERT IGNORE INTO {table} (id) VALUES ({key + 50})", f"DELETE FROM {table} WHERE id = {key + 50}",
                         "SAVEPOINT q", f"DELETE FROM {table}", "ROLLBACK TO q", ended],
                lambda: [f"XA START 'x{session}'", f"REPLACE INTO {table} (id) VALUES ({key}), ({key + 1})", f"XA END 'x{session}'",
                         f"XA PREPARE 'x{session}'", f"XA {'ROLLBACK' if ended == 'ROLLBACK' else 'COMMIT'} 'x{session}'"],
                lambda: [f"UPDATE {table}, {two} SET {table}.id = {table}.id + 50, {two}.id = {two}.id + 60 WHERE {table}.id = {two}.id AND {two}.id = {key}",
                         f"DELETE {table}, {two} FROM {table} JOIN {two} USING (id) WHERE {table}.id > 90"],
                lambda: [f"CREATE OR REPLACE TRIGGER tr1 BEFORE UPDATE ON {table} FOR EACH ROW DELETE FROM {two} WHERE id = NEW.id",
                         f"UPDATE {table} SET id = id WHERE id < {key}", "DROP TRIGGER IF EXISTS tr1"],
                lambda: [f"CREATE TABLE lk LIKE {table}", f"INSERT IGNORE INTO lk SELECT * FROM {table}", "ALTER TABLE lk ADD zz INT DEFAULT 4 FIRST",
                         f"RENAME TABLE {table} TO lk2, lk TO {table}, lk2 TO lk", f"REPLACE INTO {table} (id) VALUES ({key})", "DROP TABLE lk"],
                lambda: [f"CREATE TABLE sel (PRIMARY KEY (id)) AS SELECT * FROM {table}", f"REPLACE INTO sel (id) VALUES ({key})",
                         f"DROP TABLE {table}", f"RENAME TABLE sel TO {table}"],
                lambda: [f"DROP TABLE {table}", self._create(name), f"INSERT INTO {table} (id) VALUES ({key}), ({key + 1})"],
                lambda: [f"TRUNCATE {table}", f"INSERT INTO {table} (id) VALUES ({key})"],
                lambda: [f"RENAME TABLE {table} TO {out}.away", f"UPDATE {out}.away SET id = id + 100 ORDER BY id DESC",
                         f"RENAME TABLE {out}.away TO {self.schema}.{table}"],
                lambda: [f"ALTER TABLE {table} RENAME {out}.away, ADD {new} INT DEFAULT 3", f"ALTER TABLE {out}.away RENAME {self.schema}.{table}"],
                lambda: [f"RENAME TABLE IF EXISTS nowhere TO {table}, {table} TO {two}"],
                lambda: [f"ALTER TABLE {table} PARTITION BY HASH (id) PARTITIONS {self.random.randint(1, 3)}", f"REPLACE INTO {table} (id) VALUES ({key})",
                         self.random.choice((f"ALTER TABLE {table} TRUNCATE PARTITION p0", f"ALTER TABLE {table} REMOVE PARTITIONING",
                                             f"ALTER TABLE {table} COALESCE PARTITION 1", f"ALTER TABLE {table} ADD PARTITION PARTITIONS 2"))],
                lambda: [f"CREATE TABLE {out}.ex LIKE {table}", f"ALTER TABLE {table} PARTITION BY HASH (id) PARTITIONS 1",
                         f"INSERT INTO {out}.ex (id) VALUES ({key}), ({key + 1})", f"ALTER TABLE {table} EXCHANGE PARTITION p0 WITH TABLE {out}.ex",
                         f"REPLACE INTO {table} (id) VALUES ({key + 2})", f"DROP TABLE {out}.ex"],
                lambda: [f"ALTER TABLE {table} ADD {new} VARCHAR(400) AS (CONCAT(id, '-', {column})) {self.random.choice(('STORED', 'VIRTUAL'))} FIRST",
                         f"UPDATE {table} SET id = id + 1 ORDER BY id DESC LIMIT 3"],
                lambda: [f"ALTER TABLE {table} ADD {new} INT INVISIBLE DEFAULT {key}, MODIFY id BIGINT AFTER {column}", f"REPLACE INTO {table} (id) VALUES ({key})"],
                lambda: [f"ALTER IGNORE TABLE {table} PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN ({key + 5}))", f"INSERT IGNORE INTO {table} (id) VALUES ({key})",
                         f"ALTER TABLE {table} REMOVE PARTITIONING"],
                lambda: [f"ALTER TABLE {table} ADD CONSTRAINT ck CHECK (id <> {key + 60})", f"SET STATEMENT check_constraint_checks=0 FOR REPLACE INTO {table} (id) VALUES ({key}), ({key + 60})",
                         f"ALTER IGNORE TABLE {table} COMMENT 'x', ALGORITHM=COPY", f"ALTER TABLE {table} DROP CONSTRAINT ck"],
                lambda: [f"ALTER TABLE {table} ADD {new} VARCHAR(30) CHARACTER SET {charset} DEFAULT '{text}'", f"REPLACE INTO {table} (id, {new}) VALUES ({key}, '{text}'), ({key + 1}, '{text}x')",
                         f"ALTER TABLE {table} MODIFY {new} VARCHAR(30) CHARACTER SET utf8mb4"],
                lambda: [f"EXECUTE IMMEDIATE 'ALTER TABLE {table} ADD {new} INT DEFAULT ?' USING {key}", f"EXECUTE IMMEDIATE 'REPLACE INTO {table} (id) VALUES (?)' USING {key}"],
                lambda: [(f"BEGIN NOT ATOMIC REPLACE INTO {table} (id) VALUES ({key}); ALTER TABLE {table} ADD {new} INT DEFAULT 4; START TRANSACTION; DELETE FROM {table} WHERE id = {key}; "
                         f"SAVEPOINT q; DELETE FROM {table}; ROLLBACK TO q; {ended}; END")],
                lambda: ["SET GLOBAL log_bin_compress=ON", f"REPLACE INTO {table} (id) VALUES ({key})", "SET GLOBAL log_bin_compress=OFF"],
                lambda: ["SET sql_mode='ANSI_QUOTES'", f"ALTER TABLE \"{name}\" ADD {new} VARCHAR(20) DEFAULT '\"x\"' COMMENT '\"; DROP'", "SET sql_mode=''"],
            )
        )  # fmt: skip
        return made()

    def _undone(self) -> Sequence[str]:
        """A transaction whose savepoints are in the log: engines without transactions,
        or temporary tables, are in it.
        """

        def row() -> str:
            return f"REPLACE INTO {self._quoted(self._table())} (id) VALUES ({self._key()})"

        beside = self.random.choice(
            (
                f"REPLACE INTO {self.outside}.my VALUES ({self._key()}, 1)",
                f"REPLACE INTO {self.outside}.aria VALUES ({self._key()}, 1)",
                "CREATE TEMPORARY TABLE IF NOT EXISTS tmp (id INT PRIMARY KEY)",
                f"REPLACE INTO tmp VALUES ({self._key()})",
            )
        )
        steps = [
            "COMMIT",
            "BEGIN",
            row(),
            "SAVEPOINT s1",
            row(),
            beside,
            row(),
            "SAVEPOINT s2",
            self._dml(),
        ]
        steps += [
            self.random.choice(("ROLLBACK TO s1", "ROLLBACK TO SAVEPOINT `s2`", "ROLLBACK TO s2")),
            row(),
        ]
        steps += [self.random.choice(("COMMIT", "COMMIT", "ROLLBACK TO s1", "ROLLBACK")), "COMMIT"]
        chosen = [step for step in steps if self.random.random() < 0.93]
        return chosen or ["COMMIT"]

    # Rows

    def _dml(self) -> str:
        name = self._table()
        table, keys = self._quoted(name), self._some_keys()
        columns = list(self.columns.get(name, ()))
        settable = [column for column in columns if column.lower() != "id"]
        chosen = self.random.sample(settable, self.random.randint(0, min(3, len(settable))))
        names = ", ".join(["id", *map(self._quoted, chosen)])
        rows = ", ".join(
            f"({', '.join([str(key), *(self._value() for _ in chosen)])})" for key in keys
        )
        sets = (
            ", ".join(f"{self._quoted(column)} = {self._value()}" for column in chosen) or "id = id"
        )
        low, high = sorted((self._key(), self._key()))
        made: Callable[[], str] = self.random.choice(
            (
                lambda: f"INSERT INTO {table} ({names}) VALUES {rows}",
                lambda: f"INSERT IGNORE INTO {table} ({names}) VALUES {rows}",
                lambda: f"INSERT IGNORE INTO {table} ({names}) VALUES {rows}",
                lambda: f"REPLACE INTO {table} ({names}) VALUES {rows}",
                lambda: f"REPLACE INTO {table} ({names}) VALUES {rows}",
                lambda: (
                    f"INSERT INTO {table} ({names}) VALUES {rows} ON DUPLICATE KEY UPDATE {sets}"
                ),
                lambda: (
                    f"INSERT INTO {table} ({names}) VALUES {rows} ON DUPLICATE KEY UPDATE id = "
                    f"{table}.id + 1"
                ),
                lambda: f"UPDATE {table} SET {sets} WHERE id BETWEEN {low} AND {high}",
                lambda: f"UPDATE IGNORE {table} SET {sets} WHERE id >= {low}",
                lambda: f"UPDATE {table} SET id = id + 1 WHERE id >= {low} ORDER BY id DESC",
                lambda: f"UPDATE {table} SET id = id - 1 WHERE id > 0 ORDER BY id",
                lambda: f"UPDATE IGNORE {table} SET id = {high} WHERE id = {low}",
                lambda: f"DELETE FROM {table} WHERE id BETWEEN {low} AND {low + 3}",
                lambda: f"DELETE FROM {table} ORDER BY id LIMIT 2",
                lambda: (
                    f"DELETE FROM {table}"
                    if self.random.random() < 0.1
                    else f"DELETE FROM {table} WHERE id = {low}"
                ),
                lambda: (
                    f"INSERT IGNORE INTO {table} (id) SELECT id + {low} FROM "
                    f"{self._quoted(self._table())}"
                ),
                lambda: f"INSERT IGNORE INTO {table} (id) SELECT seq FROM seq_{low}_to_{high}",
                lambda: (
                    f"UPDATE {table}, {self._quoted(self._table())} o SET {table}.id = {table}.id "
                    f"WHERE o.id = {low}"
                ),
                lambda: (
                    f"DELETE {table} FROM {table} JOIN {self._quoted(self._table())} o ON o.id = "
                    f"{table}.id WHERE o.id < {low}"
                ),
            )
        )
        return made()

    def _beside(self) -> str:
        out, key = self.outside, self._key()
        return self.random.choice(
            (
                f"REPLACE INTO {out}.plain VALUES ({key}, {key})",
                f"REPLACE INTO {out}.log_of VALUES ({key}, 1)",
                f"INSERT IGNORE INTO {out}.view_of VALUES ({key})",
                f"DELETE FROM {out}.view_of WHERE id = {key}",
                f"SELECT {out}.makes({key})",
                f"INSERT IGNORE INTO {out}.plain VALUES ({out}.makes({key}), 1)",
                f"CALL {out}.does({key})",
                f"ALTER TABLE {out}.plain ADD IF NOT EXISTS w INT, FORCE",
                f"CREATE OR REPLACE TABLE {out}.other LIKE {self.schema}.t0",
                f"EXECUTE IMMEDIATE 'REPLACE INTO {self.schema}.t0 (id) VALUES ({key})'",
                "ANALYZE TABLE t0",
                "OPTIMIZE TABLE t1",
                (
                    f"BEGIN NOT ATOMIC REPLACE INTO {self.schema}.t0 (id) VALUES ({key}); DELETE FROM "
                    f"{self.schema}.t1 WHERE id = {key}; END"
                ),
                "FLUSH TABLES",
                "GRANT SELECT ON *.* TO CURRENT_USER",
                (
                    f"ALTER DATABASE {self.schema} CHARACTER SET "
                    f"{self.random.choice(('utf8mb4', 'latin1'))}"
                ),
            )
        )

    def _transaction(self) -> str:
        xid = f"'{self.schema}-{self.random.randrange(3)}'"
        return self.random.choice(
            ("BEGIN", "BEGIN", "COMMIT", "COMMIT", "COMMIT AND CHAIN", "ROLLBACK", "SAVEPOINT s1", "SAVEPOINT s2",
             "ROLLBACK TO s1", "ROLLBACK TO SAVEPOINT s2", "RELEASE SAVEPOINT s1", "START TRANSACTION READ WRITE",
             f"XA START {xid}", f"XA END {xid}", f"XA PREPARE {xid}", f"XA COMMIT {xid}", f"XA ROLLBACK {xid}",
             f"XA COMMIT {xid} ONE PHASE")
        )  # fmt: skip

    # Tables

    def _create(self, name: str, head: str = "CREATE TABLE") -> str:
        """A new table; with the plain head the server surely takes it."""
        chosen = self.random.sample(NAMES, 3)
        columns = [
            f"{self._quoted(each)} {self._definition(name, each, plain=head == PLAIN)}"
            for each in chosen
        ]
        key = self.random.choice(("INT", "INT", "BIGINT", "SMALLINT", "INT AUTO_INCREMENT"))
        options = self.random.choice(
            ("", "", "CHARSET=latin1", "DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
        )
        return f"{head} {self._quoted(name)} (id {key} PRIMARY KEY, {', '.join(columns)}) {options}"

    def _definition(
        self,
        table: str,
        column: str,
        *,
        adds: bool = False,
        family: int | None = None,
        plain: bool = False,
    ) -> str:
        if family is None:
            family = self.random.randrange(len(FAMILIES))
        self.types[f"{table}.{column.lower()}"] = family
        parts = [self.random.choice(FAMILIES[family])]
        if plain:
            return parts[0]
        if self.random.random() < 0.2:
            parts.append("NOT NULL")
        if self.random.random() < (0.6 if adds else 0.2):
            parts.append(f"DEFAULT {self.random.choice(DEFAULTS)}")
        if self.random.random() < 0.1:
            parts.append("COMMENT 'RENAME COLUMN a TO b, DROP c'")
        return " ".join(parts)

    def _ddl(self) -> str:
        name, other = self._table(), self._table()
        table, two = self._quoted(name), self._quoted(other)
        if self.random.random() < 0.65:
            specs = [self._spec(name) for _ in range(self.random.choice((1, 1, 1, 2, 2, 3)))]
            head = self.random.choice(
                (f"ALTER TABLE {table}", f"alter table {table}", f"ALTER TABLE {self.schema}.{table}",
                 f"ALTER ONLINE TABLE {table}", f"ALTER TABLE IF EXISTS {table}", f"ALTER IGNORE TABLE {table}")
            )  # fmt: skip
            return f"{head} {', '.join(specs)}"
        made: Callable[[], str] = self.random.choice(
            (
                lambda: self._create(name),
                lambda: self._create(name, "CREATE TABLE IF NOT EXISTS"),
                lambda: self._create(name, "CREATE OR REPLACE TABLE"),
                lambda: (
                    f"CREATE OR REPLACE TABLE {table} (PRIMARY KEY (id)) AS SELECT * FROM {two}"
                ),
                lambda: f"CREATE TABLE {table} LIKE {two}",
                lambda: f"DROP TABLE {table}",
                lambda: (
                    f"DROP TABLE IF EXISTS {table}, {two}"
                    if self.random.random() < 0.4
                    else f"DROP TABLE {table}"
                ),
                lambda: (
                    f"CREATE OR REPLACE DATABASE {self.schema}"
                    if self.random.random() < 0.2
                    else f"CREATE OR REPLACE SEQUENCE {table}"
                ),
                lambda: f"TRUNCATE TABLE {table}",
                lambda: f"TRUNCATE {table}",
                lambda: f"SET STATEMENT lock_wait_timeout=5 FOR TRUNCATE TABLE {table}",
                lambda: f"RENAME TABLE {table} TO {two}",
                lambda: f"RENAME TABLE {table} TO {two}, {self._quoted(self._table())} TO {table}",
                lambda: f"RENAME TABLE {table} TO swapped, {two} TO {table}, swapped TO {two}",
                lambda: f"ALTER TABLE {table} RENAME {two}",
                lambda: (
                    f"CREATE {self.random.choice(('', 'UNIQUE '))}INDEX k1 ON {table} "
                    f"({self._column(name)})"
                ),
                lambda: f"DROP INDEX k1 ON {table}",
                lambda: f"RENAME TABLE {table} TO {self.outside}.moved",
            )
        )
        return made()

    def _spec(self, table: str) -> str:
        old, new = self._column(table), self.random.choice(NAMES)
        named = self._quoted(self._cased(new))
        place = self.random.choice(("", "", "", " FIRST", f" AFTER {self._column(table)}"))
        plain = old.strip('`"').lower()
        family = self.types.get(f"{table}.{plain}")
        self.types.setdefault(f"{table}.{new.lower()}", family or 0)

        def renamed(text: str) -> str:
            if family is not None:
                self.types[f"{table}.{new.lower()}"] = family
            return text

        made: Callable[[], str] = self.random.choice(
            (
                lambda: f"ADD {named} {self._definition(table, new, adds=True)}{place}",
                lambda: (
                    f"ADD COLUMN IF NOT EXISTS {named} "
                    f"{self._definition(table, new, adds=True)}{place}"
                ),
                lambda: f"ADD ({named} {self._definition(table, new, adds=True)})",
                lambda: f"DROP {old}",
                lambda: f"DROP COLUMN IF EXISTS {named}",
                lambda: renamed(f"RENAME COLUMN {old} TO {named}"),
                lambda: renamed(f"RENAME COLUMN {old} TO {named}"),
                lambda: renamed(
                    f"CHANGE {old} {named} {self._definition(table, new, family=family)}{place}"
                ),
                lambda: f"MODIFY {old} {self._definition(table, plain, family=family)}{place}",
                lambda: f"MODIFY {old} {self._definition(table, plain, family=family)}",
                lambda: f"ALTER {old} SET DEFAULT 5",
                lambda: f"ADD KEY IF NOT EXISTS k2 ({old})",
                lambda: f"ADD {named} INT AS (id * 2) {self.random.choice(('STORED', 'VIRTUAL'))}",
                lambda: self.random.choice(
                    (
                        "FORCE",
                        "COMMENT 'x'",
                        "ROW_FORMAT=DYNAMIC",
                        "ENGINE=InnoDB",
                        "AUTO_INCREMENT=50",
                    )
                ),
                lambda: f"CONVERT TO CHARACTER SET {self.random.choice(('latin1', 'utf8mb4'))}",
                lambda: "MODIFY id BIGINT",
            )
        )
        return made()

    def _hazard(self) -> str:
        name, key = self._table(), self._key()
        table, column = self._quoted(name), self._column(name)
        kinds: dict[str, tuple[str, ...]] = {
            "statement": (
                "SET binlog_format=STATEMENT", "SET binlog_format=MIXED", "SET binlog_format=ROW",
                f"SET STATEMENT binlog_format=STATEMENT FOR DELETE FROM {table} WHERE id = {key}",
                (f"SET STATEMENT binlog_format=MIXED FOR INSERT IGNORE INTO {self.outside}.plain "
                f"VALUES ({self.outside}.makes({key}), 1)"),
            ),
            "savepoint": (
                f"REPLACE INTO {self.outside}.my VALUES ({key}, 1)", f"REPLACE INTO {self.outside}.aria VALUES ({key}, 1)",
                "SAVEPOINT s1", "ROLLBACK TO s1", f"REPLACE INTO {table} (id) VALUES ({key})", "BEGIN", "COMMIT",
            ),
            "temporary": (
                "CREATE TEMPORARY TABLE IF NOT EXISTS tmp (id INT PRIMARY KEY)", f"REPLACE INTO tmp VALUES ({key})",
                "DROP TEMPORARY TABLE IF EXISTS tmp", f"INSERT IGNORE INTO {table} (id) SELECT id FROM tmp",
                "CREATE TEMPORARY TABLE IF NOT EXISTS t0 (id INT PRIMARY KEY)", "DROP TEMPORARY TABLE IF EXISTS t0", "ALTER TABLE tmp ADD z INT",
            ),
            "type": (f"ALTER TABLE {table} MODIFY {column} {self._definition(name, column)}",),
            "key": (
                f"ALTER TABLE {table} DROP PRIMARY KEY, ADD PRIMARY KEY (id, {column})",
                f"ALTER TABLE {table} ADD k3 INT NOT NULL AUTO_INCREMENT UNIQUE", f"ALTER TABLE {table} DROP PRIMARY KEY",
                f"ALTER TABLE {table} ADD UNIQUE ({column})", f"ALTER IGNORE TABLE {table} ADD UNIQUE ({column})",
                f"ALTER TABLE {table} CHANGE id id VARCHAR(9)",
            ),
            "engine": (f"ALTER TABLE {table} ENGINE=MyISAM", f"CREATE TABLE IF NOT EXISTS {self._quoted(TABLES[3])} (id INT PRIMARY KEY) ENGINE=Aria"),
            "cascade": (
                f"ALTER TABLE {table} ADD FOREIGN KEY (id) REFERENCES t0 (id) ON DELETE CASCADE",
                f"ALTER TABLE {table} ADD FOREIGN KEY (id) REFERENCES t0 (id)",
            ),
            "image": ("SET binlog_row_image=MINIMAL", "SET binlog_row_image=FULL", f"REPLACE INTO {table} (id) VALUES ({key})"),
        }  # fmt: skip
        return self.random.choice(kinds[self.random.choice(sorted(self.hazards))])

    # Spelling

    def _spelt(self, text: str) -> str:
        if self.random.random() < 0.15:
            text = f"{self.random.choice(('/* app:1 */ ', '/*!50000 */ ', chr(10) + chr(9), '# x' + chr(10)))}{text}"
        if self.random.random() < 0.1:
            text = text.replace(
                " ", self.random.choice(("/**/", " /* DROP TABLE t0 */ ", "\n", "\t")), 1
            )
        if self.random.random() < 0.05 and not text.startswith(("/", "#", "\n")):
            text = f"/*M!100000 {text} */"
        if self.random.random() < 0.1:
            text = f"SET STATEMENT lock_wait_timeout=0 FOR {text}"
        return text + self.random.choice(("", "", "", ";", " -- end", " /* x */"))

    def _table(self) -> str:
        names = list(self.columns) or list(TABLES)
        return (
            self.random.choice(names) if self.random.random() < 0.85 else self.random.choice(TABLES)
        )

    def _column(self, table: str) -> str:
        names = [name for name in self.columns.get(table, ()) if name.lower() != "id"] or list(
            NAMES
        )
        return self._quoted(self._cased(self.random.choice(names)))

    def _cased(self, name: str) -> str:
        return self.random.choice((name, name, name, name.upper(), name.lower()))

    def _quoted(self, name: str) -> str:
        plain = name.isalnum() and name.lower() != "drop" and self.random.random() < 0.5
        return name if plain else f"`{name}`"

    def _key(self) -> int:
        return self.random.randrange(KEYS)

    def _some_keys(self) -> list[int]:
        return [self._key() for _ in range(self.random.randint(1, 4))]

    def _value(self) -> str:
        return self.random.choice(VALUES)
