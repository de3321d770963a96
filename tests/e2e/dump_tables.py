"""The tables of the dump matrix: keys of many kinds, each key owned by one writer,
tables small, large and wide.

A key is named by a writer and a number. `spelling` makes other bytes of the same key where the
collation says so.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WRITERS = 2


@dataclass(frozen=True)
class Shape:
    """How a table is made, and how its keys are written."""

    columns: str
    key: tuple[str, ...]
    literals: tuple[str, ...]
    """SQL of each key column, of `{n}` (unique), `{s}` (its letter, in some case),
    `{p}` (a blank).
    """
    rows: int
    note_bytes: int = 60


SHAPES = {
    "few": Shape("id INT", ("id",), ("{n}",), 24),
    "many": Shape("id BIGINT UNSIGNED", ("id",), ("18446744073709551615 - {n}",), 2600),
    "pair": Shape(
        "a SMALLINT, b VARCHAR(20) COLLATE utf8mb4_general_ci",
        ("a", "b"),
        ("{n} % 7", "'{s}é{n}{p}'"),
        700,
    ),
    "names": Shape("id VARCHAR(30) COLLATE utf8mb4_general_ci", ("id",), ("'{s}ß{n}{p}'",), 500),
    "padded": Shape("id CHAR(12) CHARACTER SET latin1", ("id",), ("'{s}{n}{p}'",), 300),
    "wide": Shape("id INT", ("id",), ("{n}",), 300, note_bytes=3000),
    "raw": Shape("id BINARY(6)", ("id",), ("CAST(LPAD(HEX({n}), 4, 'a') AS BINARY(6))",), 400),
    "exact": Shape("id DECIMAL(20,5)", ("id",), ("{n} - 500.5",), 400),
}


@dataclass(frozen=True)
class Table:
    """One table of a run."""

    name: str
    """With its database."""
    shape: Shape

    def create(self) -> str:
        """The statement."""
        shape = self.shape
        return (
            f"CREATE TABLE {self.name} ({shape.columns}, ver BIGINT NOT NULL, note "
            f"VARCHAR({shape.note_bytes}),"
            f" PRIMARY KEY ({', '.join(shape.key)})) COLLATE utf8mb4_general_ci"
        )

    def fill(self, dice: random.Random) -> str:
        """The rows that are there before anything else."""
        rows = (
            self.row(number % WRITERS, number // WRITERS, 0, dice)
            for number in range(self.shape.rows)
        )
        return self.insert(rows)

    def insert(self, rows: Iterable[str], verb: str = "INSERT IGNORE") -> str:
        """A statement that brings rows."""
        return (
            f"{verb} INTO {self.name} ({', '.join(self.shape.key)}, ver, note) VALUES "
            f"{', '.join(rows)}"
        )

    def row(self, writer: int, number: int, version: int, dice: random.Random) -> str:
        """A row's values."""
        note = f"REPEAT('{dice.choice('xyz')}', {dice.randint(0, self.shape.note_bytes)})"
        return f"({', '.join(self.spelling(writer, number, dice))}, {version}, {note})"

    def spelling(self, writer: int, number: int, dice: random.Random) -> list[str]:
        """The literals of a key, in some spelling."""
        letter = dice.choice(("aA", "bB")[writer])
        unique = number * WRITERS + writer
        return [
            each.format(n=unique, s=letter, p=dice.choice(("", "", " ")))
            for each in self.shape.literals
        ]

    def where(self, writer: int, numbers: Iterable[int], dice: random.Random) -> str:
        """The condition for keys; other spellings count."""
        keys = [self.spelling(writer, number, dice) for number in numbers]
        one = (
            " AND ".join(
                f"{name} = {value}" for name, value in zip(self.shape.key, key, strict=True)
            )
            for key in keys
        )
        return " OR ".join(f"({each})" for each in one)

    def key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """The key of a row, as bytes are: spellings differ."""
        return tuple(row[name] for name in self.shape.key)
