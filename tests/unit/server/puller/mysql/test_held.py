"""What a statement says of the rows that are older than the columns it adds; what is not sure is untold."""

import pytest

from server.puller.mysql.added import added_columns
from server.puller.mysql.held import with_held
from storage.mysql.schema import Column, Table
from storage.mysql.types import Type

UTF8 = 45
STATES = ("new", "paid")
INT = Column(name="c", type=Type.LONG)
TEXT = Column(name="c", type=Type.VARCHAR, meta=40, collation=UTF8)
ENUM = Column(name="c", type=Type.ENUM, meta=1, elems=STATES)
PRICE = Column(name="c", type=Type.NEWDECIMAL, meta=10 << 8 | 2)


def held(column: Column, declared: str) -> object:
    return with_held((column,), (), f"ALTER TABLE t ADD COLUMN {declared}")[0].held


@pytest.mark.parametrize(
    ("column", "declared", "value"),
    [
        (INT, "c INT DEFAULT -5", -5),
        (INT, "c INT DEFAULT '5' COMMENT 'x'", 5),
        (INT, "c BOOL DEFAULT TRUE", 1),
        (INT, "(c INT DEFAULT (7), d INT)", 7),
        (INT, "IF NOT EXISTS `c` INT /*!50000 DEFAULT 3 */ AFTER a", 3),
        (TEXT, "c VARCHAR(10) DEFAULT 'it''s, (new)' NOT NULL", "it's, (new)"),
        (TEXT, "c VARCHAR(10) DEFAULT 'a\\nb'", None),
        (TEXT, "c VARCHAR(10) DEFAULT 'a' 'b'", None),
        (TEXT, "c VARCHAR(10) DEFAULT _latin1'a'", None),
        (TEXT, "c VARCHAR(36) DEFAULT (uuid())", None),
        (ENUM, "c ENUM('new', 'paid') DEFAULT 'NEW'", "new"),
        (ENUM, "c ENUM('new', 'paid') DEFAULT 2", "paid"),
        (PRICE, "c DECIMAL(10, 2) DEFAULT 1.005", "1.01"),
        (INT, "c INT DEFAULT 1 + 1", None),
        (INT, "c INT DEFAULT NULL", None),
        (INT, "c INT", None),
        (INT, "c INT AS (a + 1) STORED", None),
        (Column(name="c", type=Type.DATE), "c DATE DEFAULT '0000-00-00'", None),
        (Column(name="c", type=Type.TIMESTAMP2), "c TIMESTAMP DEFAULT '2024-01-01 00:00:00'", None),
        (Column(name="c", type=Type.LONG, nullable=False), "c INT NOT NULL", 0),
        (Column(name="c", type=Type.LONG, nullable=False), "c INT AUTO_INCREMENT PRIMARY KEY", None),
        (
            Column(name="c", type=Type.ENUM, meta=1, elems=STATES, nullable=False),
            "c ENUM('new','paid') NOT NULL",
            "new",
        ),
    ],
)
def test_constants_are_told_in_the_columns_type_and_nothing_else(column: Column, declared: str, value: object) -> None:
    assert held(column, declared) == value


def test_columns_that_were_there_keep_what_was_told_until_their_type_changes() -> None:
    first = with_held((INT,), (), "ALTER TABLE t ADD c INT DEFAULT 4")
    assert with_held((INT,), first, "ALTER TABLE t ALTER c SET DEFAULT 9")[0].held == 4
    assert with_held((TEXT,), first, "ALTER TABLE t MODIFY c VARCHAR(10)")[0].held is None
    table = Table(1, "t", first, ("c",))
    assert Table.parse(table.to_doc()).columns[0].held == 4
    assert "held" not in Table(1, "t", (INT,), ("c",)).to_doc()["columns"][0]


@pytest.mark.parametrize("query", ["", "CREATE TABLE t (c INT DEFAULT 1)", "ALTER TABLE t", "ALTER TABLE t ADD 'x"])
def test_other_statements_tell_nothing(query: str) -> None:
    assert not added_columns(query)
