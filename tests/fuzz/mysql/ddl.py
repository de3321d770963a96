"""Random DDL in random spelling against a real server:
what the tracker says must be what the server has.

    python -m tests.fuzz.mysql.ddl --seconds 600 [--seed N]

It starts a MariaDB of its own; a seed is one table's whole life. After each statement that the
server has taken: the tracker's columns and keys are those of information_schema, and each row holds
what the tracker promises, by column id: the old value, or the default that was told; or the
statement was said to be unclear, so that a changefeed reads the rows again.
"""

# ruff: noqa: E501 (statements are shown on one line)

import argparse
import base64
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

from server.changefeed.source import Address
from server.puller.mysql.ddl.column_types import LostError
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.ddl.statement import Kind, read_statement
from server.puller.mysql.ddl.tokens import Dialect, version_number
from server.puller.mysql.ddl.tracker import Context, Tracked, altered, created
from server.puller.mysql.ddl.tree import AlterTable, CreateTable
from server.puller.mysql.session.catalogue import (
    read_collations,
    read_definitions,
    schema_collation,
)
from server.puller.mysql.session.connection import Session
from server.puller.mysql.session.errors import MySqlStatementError
from storage.mysql.schema import Column, Table, Type
from tests.fuzz.mysql.oracle import in_mysql_syntax
from tests.mariadb import MariaDb, running_mariadb

STATEMENTS: Final = 25
NAMES: Final = ("a", "b", "c", "d", "e", "Fg", "h i", "drop")
MODES: Final = (
    "",
    "STRICT_TRANS_TABLES",
    "STRICT_ALL_TABLES,NO_ZERO_DATE",
    "ANSI_QUOTES",
    "NO_BACKSLASH_ESCAPES",
)
TYPES: Final = (
    "INT", "int(11)", "BIGINT", "SMALLINT UNSIGNED", "TINYINT", "MEDIUMINT UNSIGNED ZEROFILL", "BOOL", "INT8",
    "DECIMAL(10,2)", "DECIMAL(12,2)", "DEC(5)", "NUMERIC(65,30)", "FLOAT", "DOUBLE", "DOUBLE PRECISION", "FLOAT(7,2)",
    "FLOAT(30)", "REAL", "BIT(5)", "BIT(12)", "DATE", "DATETIME", "DATETIME(3)", "DATETIME(6)", "TIME", "TIME(2)",
    "TIMESTAMP NULL", "YEAR", "CHAR(5)", "CHAR(8)", "VARCHAR(5)", "VARCHAR(20)", "VARCHAR(20) CHARACTER SET latin1",
    "VARCHAR(100) CHARSET utf8mb3 COLLATE utf8mb3_bin", "VARCHAR(20) BINARY", "NATIONAL VARCHAR(6)", "NCHAR(3)",
    "TEXT", "TINYTEXT", "TEXT(100)", "MEDIUMTEXT CHARACTER SET latin1", "LONG VARCHAR", "BINARY(4)", "VARBINARY(9)",
    "BLOB", "BLOB(300)", "ENUM('x','y')", "ENUM('x','y','Z z')", "ENUM('y','x')", "SET('p','q')", "SET('p','q','r')",
    "SET('q','p')", "JSON", "UUID", "INET6", "INET4", "CHAR(3) ASCII", "CHARACTER VARYING(7)", "INT SIGNED",
    "VARCHAR(9) CHARACTER SET gbk", "CHAR(4) CHARACTER SET utf16", "VARCHAR(9) CHARSET ucs2", "TEXT CHARACTER SET cp1251",
    "VARCHAR(8) CHARACTER SET utf32", "VARCHAR(9) CHARACTER SET binary", "CHAR(9) COLLATE utf8mb4_unicode_ci", "BIT(64)", "TIME(6)",
    "VARCHAR(9) CHARACTER SET sjis", "CHAR(5) UNICODE", "BIGINT UNSIGNED", "BIGINT UNSIGNED ZEROFILL", "TEXT(20) CHARACTER SET utf32",
)  # fmt: skip
DEFAULTS: Final = (
    "5", "-5", "0", "1.55", "-0.5", "'7'", "'12'", "'x'", "'p,q'", "0x41", "x'4142'", "b'101'", "TRUE", "NULL", "(7)",
    "'2024-2-9'", "20240229", "'2024-01-01'", "'2024-01-01 10:00:00.5'", "'2020-01-02 03:04:05.128'", "'10:00'", "100",
    "'-10:11:12.345'", "_latin1'x'", "N'x'", "'a' 'b'", "5.50", "'é'", "'it''s'", "'y '", "(1 + 1)", "CURRENT_TIMESTAMP",
    "'0000-00-00'", "DATE '2024-05-06'", "99", "2024", "'127.0.0.1'", "(uuid())", "1e1", "'  3 '", "007",
    r"'a\nb'", '"x"', r"'\\'", "18446744073709551615", "'-838:59:59'", "_utf8mb4'é'", "_binary'x'", "'€'", "'日'", "(NULL)", "(-(5))",
)  # fmt: skip
VALUES: Final = ("1", "0", "NULL", "-3", "200", "70000", "'x'", "'y'", "'p,q'", "'abcdef  '", "'2024-01-02 03:04:05.678'",
                 "'é日'", "1.255", "X'4100'", "'10:11:12.5'", "'z'", "'18446744073709551615'")  # fmt: skip


@dataclass
class Fuzz:
    """One table's life, made by one seed."""

    server: MariaDb
    seed: int
    told: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Raises AssertionError with the seed and the statement."""
        self.random = random.Random(self.seed)
        self.connection = self.server.connect(self.server.database("fz"))
        self.connection.decoders = {}  # all values as the server writes them
        self.session = Session(self.connection, Address("127.0.0.1", self.server.port))
        try:
            self._live()
        finally:
            self.connection.close()
        self.server.execute(f"DROP DATABASE `{self.schema}`")

    def _live(self) -> None:
        ((self.schema, version),) = self.session.execute("SELECT DATABASE(), VERSION()")
        self.dialect = Dialect(
            mariadb=self.session.flavor.is_mariadb, version=version_number(str(version))
        )
        self.collations = read_collations(self.session)
        create = self._create()
        table = self._created(create)
        for _ in range(STATEMENTS):
            self._write(table)
            mode = self.random.choice(MODES)
            self.session.execute(f"SET sql_mode='{mode}'")
            dialect = replace(self.dialect, sql_mode=_bits(mode))
            statement = self._statement(table, dialect)
            if self.dialect.mariadb and self.random.random() < 0.06:
                # Read by the session's mode, and run by its own, which is the one in the log.
                own = self.random.choice(MODES)
                statement = f"SET STATEMENT sql_mode='{own}' FOR {statement}"
                dialect = replace(self.dialect, sql_mode=_bits(own))
            before = self._rows(table.columns)
            try:
                self.session.execute(statement)
            except MySqlStatementError:  # much of it makes no sense
                self.told["refused"] += 1
                continue
            table = self._check(table, statement, dialect, before)

    # Making statements

    def _create(self) -> str:
        while True:
            columns = [
                f"{self._name(name)} {self._definition()}" for name in self.random.sample(NAMES, 4)
            ]
            create = (
                f"CREATE TABLE t (rid INT PRIMARY KEY, {', '.join(columns)}) "
                f"{self.random.choice(_OPTIONS)}"
            )
            try:
                self.session.execute("SET sql_mode=''")
                self.session.execute(create)
            except MySqlStatementError:
                continue
            return create

    def _definition(self, *, adds: bool = False) -> str:
        parts = [self.random.choice(TYPES)]
        if self.random.random() < 0.35:
            parts.append(self.random.choice(("NOT NULL", "NULL")))
        if self.random.random() < (0.7 if adds else 0.3):
            parts.append(f"DEFAULT {self.random.choice(DEFAULTS)}")
        if self.random.random() < 0.1:
            parts.append("COMMENT 'RENAME COLUMN a TO b, DROP c'")
        if self.random.random() < 0.04:
            parts.append("UNIQUE")
        if self.random.random() < 0.08:
            parts.append(self.random.choice(_ATTRIBUTES))
        return " ".join(parts)

    def _name(self, name: str, quote: str = "`") -> str:
        if self.random.random() < 0.3:
            name = self.random.choice((name.upper(), name.lower(), name.title()))
        plain = name.isalnum() and name.lower() != "drop" and self.random.random() < 0.5
        return name if plain else f"{quote}{name}{quote}"

    def _statement(self, table: Table, dialect: Dialect) -> str:
        names = [column.name for column in table.columns if column.name != "rid"]
        if not names:
            return f"ALTER TABLE t ADD {self._any(NAMES)} {self._definition(adds=True)}"
        if self.random.random() < 0.06:
            return (
                f"CREATE {self.random.choice(('', 'UNIQUE '))}INDEX {self._name('k1')} ON t "
                f"({self._any(names)})"
            )
        specs = [self._spec(names) for _ in range(self.random.choice((1, 1, 1, 2, 2, 3)))]
        head = self.random.choice(
            (
                "ALTER TABLE t",
                "alter table `t`",
                f"ALTER TABLE `{self.schema}`.t",
                "ALTER ONLINE TABLE t",
            )
        )
        head = self.random.choice(
            ("ALTER TABLE t", head, "ALTER IGNORE TABLE t" if self.random.random() < 0.2 else head)
        )
        text = f"{head} {', '.join(specs)}"
        return self._spelt(text)

    def _spelt(self, text: str) -> str:
        if self.random.random() < 0.2:
            text = f"{self.random.choice(_BEFORE)}{text}"
        if self.random.random() < 0.2:
            text = text.replace(" ", self.random.choice(_BETWEEN), 1)
        if self.random.random() < 0.15:
            text = f"SET STATEMENT lock_wait_timeout=5 FOR {text}"
        text += self.random.choice(("", "", ";", " -- end", " /* x */"))
        return text if self.dialect.mariadb else in_mysql_syntax(text)

    def _any(self, names: Sequence[str]) -> str:
        return self._name(self.random.choice(names))

    def _spec(self, names: Sequence[str]) -> str:
        other, old = self._any(NAMES), self._any(names)
        place = self.random.choice(("", "", "", " FIRST", f" AFTER {self._any([*names, *NAMES])}"))
        made: Callable[[], str] = self.random.choice(
            (
                lambda: f"ADD {other} {self._definition(adds=True)}{place}",
                lambda: f"ADD COLUMN IF NOT EXISTS {other} {self._definition(adds=True)}{place}",
                lambda: f"ADD ({other} {self._definition(adds=True)})",
                lambda: f"DROP {old}",
                lambda: f"DROP COLUMN IF EXISTS {other}",
                lambda: f"RENAME COLUMN {old} TO {other}",
                lambda: f"CHANGE {old} {other} {self._definition()}{place}",
                lambda: f"CHANGE t.{old} {other} {self._definition()}",
                lambda: f"MODIFY {old} {self._definition()}{place}",
                lambda: f"MODIFY COLUMN IF EXISTS {other} {self._definition()}",
                lambda: f"ADD UNIQUE KEY ({old})",
                lambda: f"ADD INDEX IF NOT EXISTS {other} ({old}, rid)",
                lambda: f"ALTER {old} SET DEFAULT 5",
                lambda: f"DROP KEY IF EXISTS {other}",
                lambda: self.random.choice(
                    (
                        f"RENAME INDEX {other} TO k9",
                        f"DROP INDEX {old}",
                        "DROP PRIMARY KEY, ADD PRIMARY KEY (rid)",
                        "DROP PRIMARY KEY, ADD PRIMARY KEY (rid), ADD KEY k7 (rid)",
                        f"DROP PRIMARY KEY, ADD PRIMARY KEY (rid, {old})",
                        f"ALTER {old} DROP DEFAULT",
                        f"ADD UNIQUE INDEX IF NOT EXISTS u1 ({old}, rid)",
                    )
                ),
                lambda: self.random.choice(
                    (
                        "ADD CONSTRAINT ck CHECK (rid > -1)",
                        "ADD CONSTRAINT ck CHECK (rid % 3 < 2)",
                        "DROP CONSTRAINT IF EXISTS ck",
                        "ORDER BY rid DESC",
                        "AUTO_INCREMENT=9",
                        "ENGINE=InnoDB",
                        "PARTITION BY HASH (rid) PARTITIONS 2",
                        "PARTITION BY RANGE (rid) (PARTITION p VALUES LESS THAN (700))",
                        "REMOVE PARTITIONING",
                        "STATS_PERSISTENT=1 COMMENT='DROP a'",
                    )
                ),
                lambda: (
                    "CONVERT TO CHARACTER SET "
                    f"{self.random.choice(('latin1', 'utf8mb4', 'utf8mb3', 'ascii'))}"
                ),
                lambda: (
                    "DEFAULT CHARSET = "
                    f"{self.random.choice(('latin1', 'utf8mb4 COLLATE utf8mb4_bin'))}"
                ),
                lambda: f"ADD {other} INT AS (rid * 2) {self.random.choice(('STORED', 'VIRTUAL'))}",
                lambda: self.random.choice(
                    ("FORCE", "COMMENT 'x'", "ROW_FORMAT=DYNAMIC", "ALGORITHM=COPY")
                ),
            )
        )
        return made()

    def _write(self, table: Table) -> None:
        """Some rows, whatever of them the server takes."""
        self.session.execute("SET sql_mode=''")
        for _ in range(2):
            rid = self.random.randrange(1000)
            columns = [column for column in table.columns if not column.generated]
            values = [
                str(rid) if column.name == "rid" else self.random.choice(VALUES)
                for column in columns
            ]
            names = ", ".join(f"`{column.name}`" for column in columns)
            # Rows are told apart by `rid`, also where the primary key has got another column.
            self.session.execute(f"DELETE FROM t WHERE rid = {rid}")
            try:
                self.session.execute(f"REPLACE INTO t ({names}) VALUES ({', '.join(values)})")
            except MySqlStatementError:
                self.told["row refused"] += 1

    # Comparing

    def _created(self, create: str) -> Table:
        seeded = self._catalogue().table(1)
        tree = read_statement(create, self.schema, dialect=replace(self.dialect, sql_mode=0)).tree
        assert isinstance(tree, CreateTable), create
        context = Context(
            self.collations,
            replace(self.dialect, sql_mode=0),
            schema_collation(self.session, self.schema),
        )
        try:
            tracked = created(tree, 1, 1, context)
        except LostError as err:
            self.told[f"create lost: {err}"] += 1
            return seeded
        self._same(tracked.table, seeded, create)
        return seeded

    def _catalogue(self) -> Definition:
        return read_definitions(self.session, [(self.schema, "t")])[self.schema, "t"]

    def _check(
        self, table: Table, statement: str, dialect: Dialect, before: dict[int, dict[str, Any]]
    ) -> Table:
        read = read_statement(statement, self.schema, dialect=dialect)
        at = f"seed {self.seed}, sql_mode {dialect.sql_mode}: {statement}"
        assert read.kind is Kind.DDL, f"{at}: {read.reason}"
        assert isinstance(read.tree, AlterTable), at
        now = self._catalogue()
        try:
            tracked = altered(table, read.tree, Context(self.collations, dialect))
        except LostError as err:
            self.told["lost: " + " ".join(str(err).split()[:4])] += 1
            return now.identified(table, table.free_column_id).table(1)
        self._same(tracked.table, now.table(1), at)
        self.told["unclear" if tracked.unclear else "understood"] += 1
        if not tracked.unclear:
            self._same_rows(table, tracked, before, at)
        merged = now.table(1)
        ids = {column.name: column for column in tracked.table.columns}
        columns = tuple(replace(column, id=ids[column.name].id) for column in merged.columns)
        return replace(merged, columns=columns, next_column_id=tracked.table.next_column_id)

    def _same(self, mine: Table, theirs: Table, at: str) -> None:
        assert [_shown(each) for each in mine.columns] == [
            _shown(each) for each in theirs.columns
        ], (
            f"{at}\n  tracker {[_shown(each) for each in mine.columns]}\n  server  "
            f"{[_shown(each) for each in theirs.columns]}"
        )
        assert _keys(mine) == _keys(theirs), (
            f"{at}\n  tracker {_keys(mine)}\n  server  {_keys(theirs)}"
        )
        assert mine.primary_key == theirs.primary_key, at
        assert mine.collation == theirs.collation, (
            f"{at}: collation {mine.collation}, not {theirs.collation}"
        )

    def _same_rows(
        self, old: Table, tracked: Tracked, before: dict[int, dict[str, Any]], at: str
    ) -> None:
        after = self._rows(tracked.table.columns)
        assert after.keys() == before.keys(), f"{at}: rows came or went"
        by_id = {column.id: column for column in old.columns}
        for rid, row in after.items():
            for column in tracked.table.columns:
                was = by_id.get(column.id)
                value = _plain(column, row[column.name])
                expected = _held(column) if was is None else _plain(was, before[rid][was.name])
                if column.type is Type.DOUBLE and was is not None and was.type is Type.FLOAT:
                    continue  # shown with other digits
                if column.type is Type.FLOAT and (was is None or was.type is Type.FLOAT):
                    value, expected = (
                        _six_digits(value),
                        _six_digits(expected),
                    )  # FLOAT(7,2) shows more
                if isinstance(value, str) and isinstance(expected, bytes):
                    value = self._stored(column, value)
                if isinstance(value, bytes) and isinstance(expected, str) and was is not None:
                    expected = self._stored(was, expected)
                assert value == expected, (
                    f"{at}\n  row {rid}, {column.name}: {value!r}, not {expected!r}"
                )

    def _stored(self, column: Column, text: str) -> bytes:
        """The bytes of an address or UUID, as a log has them, which SELECT shows as text."""
        kind = "INET4" if column.meta == 4 else "UUID" if "-" in text else "INET6"
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"SELECT HEX(CAST(CAST(%s AS {kind}) AS BINARY({column.meta})))", (text,)
            )
            ((stored,),) = cursor.fetchall()
        return bytes.fromhex(_text(stored))

    def _rows(self, columns: Sequence[Column]) -> dict[int, dict[str, Any]]:
        with self.connection.cursor() as cursor:
            names = ", ".join(f"`{column.name}`" for column in columns)
            cursor.execute(f"SELECT rid, {names} FROM t")
            return {
                int(row[0]): dict(zip((each.name for each in columns), row[1:], strict=True))
                for row in cursor
            }


def _shown(column: Column) -> tuple[Any, ...]:
    kind = (
        column.type.name,
        column.meta,
        column.unsigned,
        column.nullable,
        column.collation,
        column.elems,
    )
    return column.name, *kind, bool(column.generated), column.auto_increment


def _keys(table: Table) -> list[tuple[str, str, tuple[str, ...]]]:
    return sorted((each.name.lower(), each.kind, each.columns) for each in table.indexes or ())


def _plain(column: Column, value: Any) -> Any:
    """A value of SELECT, as batches show it."""
    if value is None or column.type in (Type.DATE, Type.DATETIME2, Type.TIMESTAMP2):
        text = None if value is None else _text(value)
        if text is None:
            return None
        return (
            f"{text if '.' in text else text + '.'}".rstrip("0").rstrip(".")
            if ":" in text
            else text
        )
    if column.type in (Type.FLOAT, Type.DOUBLE):
        return float(value)
    if column.type in (Type.TINY, Type.SHORT, Type.INT24, Type.LONG, Type.LONGLONG, Type.YEAR):
        return int(value)
    if isinstance(value, bytes) and column.is_text:
        return value.decode("utf8")
    return value if isinstance(value, bytes) else _text(value)


def _six_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _text(value: Any) -> str:
    return value.decode("utf8") if isinstance(value, bytes) else str(value)


def _held(column: Column) -> Any:
    """What was told of a new column, in the same form."""
    value = column.initial_default
    if value is None:
        return None
    if column.type is Type.BIT or (
        column.type in (Type.STRING, Type.VARCHAR, Type.BLOB) and not column.is_text
    ):
        return base64.b64decode(str(value))
    if column.type is Type.DATETIME2:
        text = str(value).replace("T", " ")
        return (text if "." in text else text + ".").rstrip("0").rstrip(".")
    return value


def _bits(mode: str) -> int:
    bits = {
        "STRICT_TRANS_TABLES": 1 << 21,
        "STRICT_ALL_TABLES": 1 << 22,
        "ANSI_QUOTES": 4,
        "NO_BACKSLASH_ESCAPES": 1 << 20,
    }
    return sum(bits.get(part, 0) for part in mode.split(","))


_ATTRIBUTES: Final = (
    "INVISIBLE",
    "ON UPDATE CURRENT_TIMESTAMP",
    "CHECK (rid > -1)",
    "COLLATE utf8mb4_bin",
    "COLLATE latin1_german1_ci",
    "REFERENCES nobody (x)",
)
_OPTIONS: Final = (
    "",
    "CHARSET=latin1",
    "DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    "CHARSET utf8mb3",
    "ENGINE=InnoDB",
)
_BEFORE: Final = ("/* app:1 */ ", "-- x\n", "# x\n", "/*!50000 */ ", "\n\t")
_BETWEEN: Final = ("/**/", " /* ALTER TABLE t DROP a */ ", "\n", " # x\n ", "\t")


def lives(
    server: MariaDb, *, first: int | None = None, tables: int | None = None, seconds: float = inf
) -> Counter[str]:
    """Run tables' lives, of seeds one after the other: so many, or for so long;
    what was told of the statements, counted.
    """
    told: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    seed = random.randrange(1 << 31) if first is None else first
    while told["tables"] != tables and time.monotonic() <= deadline:
        fuzz = Fuzz(server, seed)
        fuzz.run()
        told += fuzz.told
        told["tables"] += 1
        seed += 1
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    with running_mariadb() as server:
        print(lives(server, first=arguments.seed, seconds=arguments.seconds))


if __name__ == "__main__":
    main()
