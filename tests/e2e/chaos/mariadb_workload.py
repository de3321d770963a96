"""What writers do to MariaDB: transfers in a bank of three tables, lists that are appended to, and
rows whose unique keys change in every way that SQL has. Each transaction leaves its mark.

A mark is a row of `marks` with a number that is used once. So a lake's marks say which transactions
a cut shows, and the server's log says in which order they committed (`chaos.history`).
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pymysql
from pymysql.cursors import Cursor

from tests.e2e.chaos.checks import ACCOUNTS, BANK, LISTS, OPENING_BALANCE
from tests.e2e.chaos.run import BULK_ROWS, DATABASE
from tests.mariadb import MariaDb

_MARKS_OF_WRITER = 10_000_000
_MEMBERS, _OWNERS = 24, 12
_ACTIVE_LISTS, _LIST_APPENDS = 3, 60
_DUPLICATE_ENTRY, _LOCKED, _DEADLOCK, _REFERENCED = 1062, 1205, 1213, 1451
_REFUSED = (_DUPLICATE_ENTRY, _LOCKED, _DEADLOCK, _REFERENCED, 1452)
_AGAIN_S = 0.3
_TIMEOUT_S = 5

_TABLES = """
CREATE TABLE marks (id BIGINT PRIMARY KEY, kind VARCHAR(20) NOT NULL);
CREATE TABLE members (id INT PRIMARY KEY, name VARCHAR(20) NOT NULL, slot INT, v BIGINT NOT NULL,
  UNIQUE KEY (name), UNIQUE KEY (slot));
CREATE TABLE bulk (id INT PRIMARY KEY, v BIGINT NOT NULL);
CREATE TABLE tallies (id INT PRIMARY KEY, members INT NOT NULL);
CREATE TABLE renames (id INT AUTO_INCREMENT PRIMARY KEY, old VARCHAR(20), new VARCHAR(20));
CREATE TRIGGER one_more AFTER INSERT ON members FOR EACH ROW
  UPDATE tallies SET members = members + 1 WHERE id = 1;
CREATE TRIGGER one_less AFTER DELETE ON members FOR EACH ROW
  UPDATE tallies SET members = members - 1 WHERE id = 1;
CREATE TRIGGER renamed AFTER UPDATE ON members FOR EACH ROW
  INSERT INTO renames (old, new) SELECT OLD.name, NEW.name FROM DUAL WHERE OLD.name != NEW.name;
CREATE TABLE owners (id INT PRIMARY KEY, v BIGINT NOT NULL);
CREATE TABLE pets (id INT PRIMARY KEY, owner INT NOT NULL,
  FOREIGN KEY (owner) REFERENCES owners (id));
CREATE TABLE cascaded (id INT PRIMARY KEY, owner INT NOT NULL,
  FOREIGN KEY (owner) REFERENCES owners (id) ON DELETE CASCADE)
"""
SCHEMA = (
    *(f"CREATE TABLE {name} (id INT PRIMARY KEY, balance BIGINT NOT NULL)" for name in BANK),
    *(f"CREATE TABLE {name} (id INT PRIMARY KEY, elements TEXT NOT NULL)" for name in LISTS),
    *_TABLES.split(";\n"),
)
COLUMNS = {
    "marks": ("id", "kind"),
    **dict.fromkeys(BANK, ("id", "balance")),
    **dict.fromkeys(LISTS, ("id", "elements")),
    "members": ("id", "name", "slot", "v"),
    "bulk": ("id", "v"),
    "tallies": ("id", "members"),
    "renames": ("id", "old", "new"),
    "owners": ("id", "v"),
    "pets": ("id", "owner"),
}
"""Of the tables that are replicated."""
FILTER = (f"{DATABASE}.*", f"!{DATABASE}.cascaded")
"""Rows that a cascade removes are in no log: a changefeed with such a table is refused."""


def create(server: MariaDb) -> None:
    """The tables, all empty."""
    server.execute(f"CREATE DATABASE {DATABASE}")
    server.execute(*SCHEMA, database=DATABASE)


def fill(server: MariaDb) -> None:
    """What tables hold at first, in two transactions."""
    rows = ", ".join(f"({number}, {OPENING_BALANCE})" for number in range(ACCOUNTS))
    statements = [f"INSERT INTO {name} VALUES {rows}" for name in BANK]
    statements += ["INSERT INTO tallies VALUES (1, 0)", _mark(1, "fill")]
    server.execute("BEGIN", *statements, "COMMIT", database=DATABASE)
    bulk = f"INSERT INTO bulk SELECT seq * 2, 0 FROM seq_1_to_{BULK_ROWS}"
    server.execute("BEGIN", bulk, _mark(2, "fill"), "COMMIT", database=DATABASE)


class Writer:
    """One client, which goes on whatever happens to the server."""

    def __init__(self, server: MariaDb, number: int, dice: random.Random, pause_s: float) -> None:
        self.committed: set[int] = set()
        """Marks of transactions whose COMMIT was answered."""
        self.begun = 0
        self._server = server
        self._number = number
        self._dice = dice
        self._pause_s = pause_s
        self._connection: pymysql.Connection[Cursor] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more; returns when the last transaction has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._dice.random() * 2 * self._pause_s):
            self.begun += 1
            mark = self._number * _MARKS_OF_WRITER + self.begun
            kinds: list[tuple[str, Callable[[Cursor, int], None]]] = [
                ("transfer", self._transfer),
                ("append", self._append),
                ("keys", self._change_keys),
                ("family", self._change_family),
                ("bulk", self._change_bulk),
            ]
            kind, write = self._dice.choices(kinds, (25, 30, 25, 10, 10))[0]
            try:
                self._transact(mark, kind, write)
            except pymysql.Error as err:
                self._give_up(err)

    def _transact(self, mark: int, kind: str, write: Callable[[Cursor, int], None]) -> None:
        if self._connection is None:
            self._connection = pymysql.connect(
                host=self._server.host, port=self._server.port, user="root", database=DATABASE,
                connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, write_timeout=_TIMEOUT_S,
            )  # fmt: skip
        with self._connection.cursor() as cursor:
            cursor.execute("BEGIN")
            marked_first = self._dice.random() < 0.5
            if marked_first:
                cursor.execute(_mark(mark, kind))
            write(cursor, mark)
            if not marked_first:
                cursor.execute(_mark(mark, kind))
            if self._dice.random() < 0.05:
                cursor.execute("ROLLBACK")
                return
            cursor.execute("COMMIT")
        self.committed.add(mark)

    def _give_up(self, err: pymysql.Error) -> None:
        """Of one transaction; of the session, too, if that may be gone."""
        assert self._connection is not None or isinstance(err, pymysql.OperationalError)
        if self._connection is not None and err.args[0] in _REFUSED:
            with suppress(pymysql.Error):
                self._connection.rollback()
                return
        if isinstance(err, pymysql.ProgrammingError):
            raise err
        if self._connection is not None:
            with suppress(pymysql.Error):
                self._connection.close()
        self._connection = None
        time.sleep(_AGAIN_S)

    # Transactions

    def _transfer(self, cursor: Cursor, mark: int) -> None:
        del mark
        amount = self._dice.randint(1, 50)
        for change in (-amount, amount):
            table, account = self._dice.choice(BANK), self._dice.randrange(ACCOUNTS)
            cursor.execute(f"UPDATE {table} SET balance = balance + {change} WHERE id = {account}")

    def _append(self, cursor: Cursor, mark: int) -> None:
        first = self.begun // _LIST_APPENDS * _ACTIVE_LISTS
        for _ in range(self._dice.choice((1, 2, 2, 3))):
            table, number = self._dice.choice(LISTS), first + self._dice.randrange(_ACTIVE_LISTS)
            cursor.execute(
                f"INSERT INTO {table} VALUES ({number}, '{mark}')"
                f" ON DUPLICATE KEY UPDATE elements = CONCAT(elements, ' {mark}')"
            )

    def _change_keys(self, cursor: Cursor, mark: int) -> None:
        dice = self._dice
        one, two = dice.sample(range(_MEMBERS), 2)
        row = f"({one}, 'n{dice.randrange(_MEMBERS)}', {self._slot()}, {mark})"
        again = f" ON DUPLICATE KEY UPDATE id = {two}, slot = {self._slot()}, v = {mark}"
        ways = (
            (f"REPLACE INTO members VALUES {row}",),
            (f"INSERT INTO members VALUES {row}{again}",),
            (f"INSERT IGNORE INTO members VALUES {row}",),
            (f"UPDATE members SET id = {two}, v = {mark} WHERE id = {one}",),
            (f"UPDATE members SET id = id + 1 WHERE id >= {one} ORDER BY id DESC",),
            (f"UPDATE members SET id = id - 1 WHERE id <= {one} ORDER BY id",),
            _swap("id", one, two, "-1"),
            (
                f"UPDATE members SET name = CONCAT(name, 'x') WHERE id = {one}",
                f"UPDATE members SET name = 'n{two}' WHERE id = {two}",
            ),
            (f"DELETE FROM members WHERE id = {one}", f"INSERT INTO members VALUES {row}"),
            (f"DELETE FROM members WHERE id IN ({one}, {two}) OR id NOT BETWEEN 0 AND {_MEMBERS}",),
        )
        for statement in dice.choices(ways, (3, 3, 2, 2, 1, 1, 3, 2, 2, 1))[0]:
            cursor.execute(statement)

    def _slot(self) -> str:
        return self._dice.choice(("NULL", str(self._dice.randrange(_MEMBERS))))

    def _change_bulk(self, cursor: Cursor, mark: int) -> None:
        first = self._dice.randrange(2 * BULK_ROWS)
        cursor.execute(
            self._dice.choice(
                (
                    f"UPDATE bulk SET v = {mark} WHERE id BETWEEN {first} AND {first + 20}",
                    f"DELETE FROM bulk WHERE id BETWEEN {first} AND {first + 4}",
                    f"INSERT IGNORE INTO bulk VALUES ({first}, {mark}), ({first + 1}, {mark})",
                    f"UPDATE IGNORE bulk SET id = id + 1, v = {mark} WHERE id = {first}",
                )
            )
        )

    def _change_family(self, cursor: Cursor, mark: int) -> None:
        owner = self._dice.randrange(_OWNERS)
        if self._dice.random() < 0.4:
            cursor.execute(f"DELETE FROM pets WHERE owner = {owner}")
            cursor.execute(f"DELETE FROM owners WHERE id = {owner}")
            return
        cursor.execute(
            f"INSERT INTO owners VALUES ({owner}, {mark}) ON DUPLICATE KEY UPDATE v = {mark}"
        )
        pet = mark % 1000 * 10 + self._number
        for table in ("pets", "cascaded"):
            cursor.execute(f"REPLACE INTO {table} VALUES ({pet}, {owner})")


def _swap(column: str, one: int, two: int, between: str) -> tuple[str, ...]:
    """Two rows change places in a key, by way of a value that no row has."""
    return tuple(
        f"UPDATE members SET {column} = {new} WHERE {column} = {old}"
        for old, new in ((one, between), (two, one), (between, two))
    )


def _mark(number: int, kind: str) -> str:
    return f"INSERT INTO marks VALUES ({number}, '{kind}')"
