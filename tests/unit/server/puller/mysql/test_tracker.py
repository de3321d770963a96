"""What tables are after statements, by identity: renames, swaps, what is dropped and added,
values that change.
"""

# ruff: noqa: E501 (statements are shown on one line)

import base64
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from server.puller.mysql.ddl.column_types import Collations, LostError
from server.puller.mysql.ddl.copies import doubt_of_copy, taken_over
from server.puller.mysql.ddl.definition import UNTOLD
from server.puller.mysql.ddl.statement import read_statement
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tracker import Context, Tracked, altered, created
from server.puller.mysql.ddl.tree import AlterTable, CreateTable
from storage.mysql.schema import Type

STRICT = Dialect(version=101119, sql_mode=1 << 21)
LAX = Dialect(version=101119, sql_mode=0)
COLLATIONS = Collations(
    {
        "utf8mb4_general_ci": 45,
        "utf8mb4_bin": 46,
        "latin1_swedish_ci": 8,
        "latin1_bin": 47,
        "utf8mb3_general_ci": 33,
        "ucs2_general_ci": 35,
    },
    {"utf8mb4": 45, "latin1": 8, "utf8mb3": 33, "ucs2": 35},
)


def table_of(definition: str, dialect: Dialect = STRICT) -> Tracked:
    tree = read_statement(
        f"CREATE TABLE t ({definition}) CHARSET utf8mb4", "db", dialect=dialect
    ).tree
    assert isinstance(tree, CreateTable)
    return created(tree, 1, 1, Context(COLLATIONS, dialect))


def after(definition: str, *statements: str, dialect: Dialect = STRICT) -> Tracked:
    tracked = table_of(definition, dialect)
    for statement in statements:
        tree = read_statement(statement, "db", dialect=dialect).tree
        assert isinstance(tree, AlterTable), statement
        tracked = altered(tracked.table, tree, Context(COLLATIONS, dialect))
    return tracked


def ids(tracked: Tracked) -> dict[str, int]:
    return {column.name: column.id for column in tracked.table.columns}


T = "id INT PRIMARY KEY, v INT, x INT, y INT"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("/* app:1 */ ALTER TABLE t RENAME COLUMN v TO w", {"id": 1, "w": 2, "x": 3, "y": 4}),
        ("-- x\nALTER TABLE t RENAME COLUMN v TO w", {"id": 1, "w": 2, "x": 3, "y": 4}),
        ("# x\nALTER TABLE t RENAME /* x */ COLUMN`v`TO`w`", {"id": 1, "w": 2, "x": 3, "y": 4}),
        ("ALTER TABLE t RENAME COLUMN IF EXISTS V TO w", {"id": 1, "w": 2, "x": 3, "y": 4}),
        ("ALTER TABLE t CHANGE t.V w INT", {"id": 1, "w": 2, "x": 3, "y": 4}),
        ("ALTER TABLE t MODIFY V BIGINT", {"id": 1, "V": 2, "x": 3, "y": 4}),
        ("ALTER TABLE t MODIFY ID BIGINT", {"ID": 1, "v": 2, "x": 3, "y": 4}),
        ("ALTER TABLE t RENAME COLUMN x TO y, RENAME COLUMN y TO x", {"id": 1, "v": 2, "y": 3, "x": 4}),
        ("ALTER TABLE t CHANGE x y INT, CHANGE y x INT", {"id": 1, "v": 2, "y": 3, "x": 4}),
        ("ALTER TABLE t RENAME COLUMN x TO y, RENAME COLUMN y TO z", {"id": 1, "v": 2, "y": 3, "z": 4}),
        ("ALTER TABLE t RENAME COLUMN v TO w, ADD v INT DEFAULT 77", {"id": 1, "w": 2, "x": 3, "y": 4, "v": 5}),
        ("ALTER TABLE t DROP v, ADD v INT DEFAULT 5", {"id": 1, "x": 3, "y": 4, "v": 5}),
        ("ALTER TABLE t DROP v, ADD z INT COMMENT 'rename column v to z'", {"id": 1, "x": 3, "y": 4, "z": 5}),
        ("ALTER TABLE t ADD a INT FIRST, ADD b INT AFTER a, MODIFY y INT AFTER b",
         {"a": 5, "b": 6, "y": 4, "id": 1, "v": 2, "x": 3}),
        ("ALTER TABLE t MODIFY v INT AFTER x, MODIFY x INT FIRST", {"x": 3, "id": 1, "v": 2, "y": 4}),
        ("ALTER TABLE t MODIFY v INT AFTER x, MODIFY x INT AFTER y", {"id": 1, "v": 2, "y": 4, "x": 3}),
        ("ALTER TABLE t CHANGE v w INT AFTER z, CHANGE x z INT FIRST", {"z": 3, "id": 1, "w": 2, "y": 4}),
        ("ALTER TABLE t ADD a INT AFTER v, MODIFY v INT FIRST", {"v": 2, "id": 1, "a": 5, "x": 3, "y": 4}),
    ],
)  # fmt: skip
def test_columns_keep_their_identity(statement: str, expected: dict[str, int]) -> None:
    tracked = after(T, statement)
    assert list(ids(tracked).items()) == list(expected.items())
    assert not tracked.unclear
    assert tracked.table.primary_key == (
        next(iter(name for name, number in expected.items() if number == 1)),
    )


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("MODIFY COLUMN IF EXISTS f INT, ADD COLUMN IF NOT EXISTS F BIGINT", ["id", "v", "x", "y"]),
        ("ADD COLUMN IF NOT EXISTS f BIGINT, MODIFY COLUMN IF EXISTS f INT", ["id", "v", "x", "y", "f"]),
        ("CHANGE COLUMN IF EXISTS g f INT, ADD COLUMN IF NOT EXISTS f BIGINT", ["id", "v", "x", "y"]),
        ("CHANGE COLUMN IF EXISTS f g INT, ADD COLUMN IF NOT EXISTS f INT", ["id", "v", "x", "y", "f"]),
        ("CHANGE v f INT, ADD COLUMN IF NOT EXISTS f BIGINT", ["id", "f", "x", "y"]),
        ("CHANGE v f INT, ADD COLUMN IF NOT EXISTS v BIGINT", ["id", "f", "x", "y"]),
        ("DROP COLUMN v, ADD COLUMN IF NOT EXISTS v BIGINT", ["id", "x", "y"]),
        ("MODIFY COLUMN IF EXISTS f INT, ADD COLUMN f BIGINT", ["id", "v", "x", "y", "f"]),
    ],
)  # fmt: skip
def test_a_column_is_there_that_the_statement_defined_before(
    statement: str, expected: list[str]
) -> None:
    """As MariaDB 10.11 answers SHOW COLUMNS."""
    assert list(ids(after(T, f"ALTER TABLE t {statement}"))) == expected


def test_ids_are_never_given_out_again() -> None:
    tracked = after(
        T,
        "ALTER TABLE t ADD n INT DEFAULT 5",
        "ALTER TABLE t DROP n",
        "ALTER TABLE t ADD n INT DEFAULT 6",
    )
    assert ids(tracked)["n"] == 6
    again = type(tracked.table).parse(tracked.table.to_doc())
    assert again == tracked.table
    assert again.free_column_id == 7


def test_several_alters_are_followed_each_by_itself() -> None:
    tracked = after(T, "ALTER TABLE t ADD n INT DEFAULT 5", "ALTER TABLE t RENAME COLUMN n TO m")
    assert [
        (column.id, column.initial_default)
        for column in tracked.table.columns
        if column.name == "m"
    ] == [(5, 5)]


@pytest.mark.parametrize(
    ("column", "statement", "strict", "lax"),
    [
        ("c INT", "MODIFY c INT NOT NULL", False, True),
        ("c VARCHAR(9)", "MODIFY c VARCHAR(3)", True, True),
        ("c VARCHAR(9)", "MODIFY c VARCHAR(20)", False, False),
        ("c VARCHAR(9)", "MODIFY c TEXT", False, False),
        ("c CHAR(9)", "MODIFY c VARCHAR(9)", False, False),
        ("c VARCHAR(9)", "MODIFY c CHAR(9)", True, True),
        ("c DATETIME(6)", "MODIFY c DATETIME", True, True),
        ("c DATETIME", "MODIFY c DATETIME(6)", False, False),
        ("c DATETIME", "MODIFY c TIMESTAMP", True, True),
        ("c SET('x','y')", "MODIFY c SET('y','x')", True, True),
        ("c ENUM('x','y')", "MODIFY c ENUM('y','x')", True, True),
        ("c ENUM('x','y')", "MODIFY c ENUM('x','y','z')", False, False),
        ("c VARCHAR(9)", "CONVERT TO CHARACTER SET latin1", True, True),
        ("c VARCHAR(9) CHARSET latin1", "CONVERT TO CHARACTER SET utf8mb4", False, False),
        ("c INT", "CONVERT TO CHARACTER SET latin1", False, False),
        ("c BIGINT", "MODIFY c INT", True, True),
        ("c INT UNSIGNED", "MODIFY c BIGINT UNSIGNED", True, True),
        ("c INT UNSIGNED", "MODIFY c INT", True, True),
        ("c SMALLINT UNSIGNED", "MODIFY c INT UNSIGNED", False, False),
        ("c DECIMAL(38,2)", "MODIFY c DECIMAL(40,2)", True, True),
        ("c INT", "MODIFY c BIGINT", False, False),
        ("c INT UNSIGNED", "MODIFY c BIGINT", False, False),
        ("c INT", "MODIFY c VARCHAR(20)", True, True),
        ("c DECIMAL(10,2)", "MODIFY c DECIMAL(12,2)", False, False),
        ("c DECIMAL(10,2)", "MODIFY c DECIMAL(10,1)", True, True),
        ("c FLOAT", "MODIFY c FLOAT(5,1)", True, True),
        ("c INT", "ADD n INT AUTO_INCREMENT UNIQUE", True, True),
        ("c INT", "ADD g INT AS (c*2) STORED", True, True),
        ("c INT", "ADD g INT AS (c*2)", True, True),
        ("c INT AS (id*3) STORED", "MODIFY c INT AS (id*5) STORED", True, True),
        ("c INT", "ADD u VARCHAR(36) DEFAULT (uuid())", True, True),
        ("c INT", "ADD u DATETIME DEFAULT NOW()", True, True),
        ("c INT", "ADD u TIMESTAMP DEFAULT '2024-01-01 00:00:00'", True, True),
        ("c INT", "ADD u INT DEFAULT 99999999999", True, True),
        ("c INT", "ADD u INT DEFAULT 9, ADD KEY (u), COMMENT 'x', ENGINE=InnoDB", False, False),
        ("c INT", "DROP PRIMARY KEY, ADD PRIMARY KEY (c)", False, True),
        ("c INT", "DROP PRIMARY KEY, ADD PRIMARY KEY (id, C)", False, True),
        ("c INT", "DROP PRIMARY KEY, RENAME COLUMN c TO d, ADD PRIMARY KEY (id, D)", False, True),
        ("c INT", "DROP PRIMARY KEY, CHANGE c d INT, ADD PRIMARY KEY (id, D)", False, True),
        ("c INT NOT NULL", "DROP PRIMARY KEY, ADD PRIMARY KEY (id, C)", False, False),
        ("c TIMESTAMP NULL", "DROP PRIMARY KEY, ADD PRIMARY KEY (id, C)", True, True),
    ],
)
def test_what_changes_stored_values_is_read_again(
    column: str, statement: str, strict: bool, lax: bool
) -> None:
    for dialect, expected in ((STRICT, strict), (LAX, lax)):
        tracked = after(
            f"id INT PRIMARY KEY, {column}", f"ALTER TABLE t {statement}", dialect=dialect
        )
        assert bool(tracked.unclear) == expected, tracked.unclear


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DROP KEY a, ADD UNIQUE IF NOT EXISTS A (e)", {"b": "e", "PRIMARY": "id"}),
        ("DROP KEY IF EXISTS a, ADD KEY IF NOT EXISTS d (e), ADD KEY IF NOT EXISTS a (e)",
         {"b": "e", "d": "e", "PRIMARY": "id"}),
        ("RENAME KEY a TO d, ADD KEY IF NOT EXISTS a (e)", {"d": "c", "b": "e", "PRIMARY": "id"}),
        ("DROP COLUMN c, ADD KEY IF NOT EXISTS a (e)", {"b": "e", "PRIMARY": "id"}),
        ("ADD KEY x (c), ADD KEY IF NOT EXISTS x (e)", {"a": "c", "b": "e", "x": "c", "PRIMARY": "id"}),
        ("ADD KEY (c), ADD KEY IF NOT EXISTS (c, e)", {"a": "c", "b": "e", "c": "c", "PRIMARY": "id"}),
        ("ADD PRIMARY KEY IF NOT EXISTS (c)", {"a": "c", "b": "e", "PRIMARY": "id"}),
        ("DROP PRIMARY KEY, ADD PRIMARY KEY IF NOT EXISTS (c)", {"a": "c", "b": "e"}),
        ("RENAME KEY a TO b, RENAME KEY b TO a", {"b": "c", "a": "e", "PRIMARY": "id"}),
        ("RENAME KEY a TO b, DROP KEY b", {"b": "c", "PRIMARY": "id"}),
        ("RENAME KEY a TO d, DROP KEY IF EXISTS d", {"d": "c", "b": "e", "PRIMARY": "id"}),
    ],
)  # fmt: skip
def test_keys_are_looked_up_by_the_names_before_the_statement(
    statement: str, expected: dict[str, str]
) -> None:
    """As MariaDB 10.11 answers SHOW INDEX: IF NOT EXISTS sees keys that the statement drops, and
    DROP does not see new names.
    """
    tracked = after(
        "id INT PRIMARY KEY, c INT, e INT NOT NULL, KEY a (c), KEY b (e)",
        f"ALTER TABLE t {statement}",
    )
    found = {index.name: index.columns[0] for index in tracked.table.indexes or ()}
    assert found == expected
    assert tracked.table.primary_key == (("id",) if "PRIMARY" in expected else ())
    assert [column.nullable for column in tracked.table.columns if column.name == "c"] in (
        [True],
        [],
    )


def test_whether_a_key_is_there_by_a_column_of_the_statement_is_not_known() -> None:
    with pytest.raises(LostError, match="own key"):
        after(T, "ALTER TABLE t ADD f INT UNIQUE, ADD KEY IF NOT EXISTS (f)")
    for statement in ("ADD COLUMN IF NOT EXISTS f INT", "MODIFY COLUMN IF EXISTS v INT"):
        with pytest.raises(LostError, match="depends on the keys' names"):
            after(T, f"ALTER TABLE t {statement} UNIQUE")


def test_a_column_added_with_the_primary_key_holds_no_null() -> None:
    tracked = after(
        "id INT PRIMARY KEY", "ALTER TABLE t ADD x INT, DROP PRIMARY KEY, ADD PRIMARY KEY (ID, X)"
    )
    assert [(column.initial_default, column.nullable) for column in tracked.table.columns[1:]] == [
        (0, False)
    ]
    assert not tracked.unclear
    assert tracked.table.primary_key == ("id", "x")


@pytest.mark.parametrize(
    ("columns", "statement", "unclear"),
    [
        ("c VARCHAR(9), l INT AS (LENGTH(c))", "MODIFY c VARCHAR(9) CHARACTER SET utf8mb4", True),
        ("c FLOAT, s TEXT AS (CONCAT(`C`)) STORED", "MODIFY c DOUBLE", True),
        ("c INT, s TEXT AS (CONCAT(c)) STORED", "CHANGE c d INT ZEROFILL", True),
        ("c INT DEFAULT 5, w INT AS (DEFAULT(c))", "ALTER c SET DEFAULT 6", True),
        ("c INT DEFAULT 5, w INT AS (DEFAULT(c))", "ALTER c DROP DEFAULT", True),
        ("c VARCHAR(9) CHARSET latin1, l INT AS (LENGTH(c))", "CONVERT TO CHARACTER SET utf8mb4", True),
        ("`c-d` FLOAT, s TEXT AS (CONCAT(`c-d`))", "MODIFY `c-d` DOUBLE", True),
        ("c INT, v INT, l INT AS (v * 2)", "MODIFY c BIGINT, ALTER v SET DEFAULT 5", False),
        ("c INT, l INT AS (c * 2)", "RENAME COLUMN c TO d, ADD x INT DEFAULT 5", False),
        ("c INT, l INT AS (c * 2)", "DROP l, MODIFY c BIGINT", False),
        ("c INT, l INT AS (c * 2)", "DROP c, ADD c INT DEFAULT 7", True),
        ("c INT, d INT, l INT AS (c * 2)", "DROP c, RENAME COLUMN d TO c", True),
        ("c INT, l INT AS (c * 2)", "RENAME COLUMN c TO d, ADD c INT DEFAULT 7", False),
        ("c VARCHAR(9) CHARSET latin1, l INT AS (LENGTH(c))", "MODIFY c VARCHAR(9), MODIFY l INT AS (LENGTH(c))", True),
        ("c INT, l INT AS (c * 2)", "MODIFY c INT, MODIFY l INT AS (c * 2) COMMENT 'x'", True),
    ],
)  # fmt: skip
def test_what_is_computed_from_a_changed_column_is_read_again(
    columns: str, statement: str, unclear: bool
) -> None:
    tracked = after(f"id INT PRIMARY KEY, {columns}", f"ALTER TABLE t {statement}")
    assert bool(tracked.unclear) is unclear, tracked.unclear


@pytest.mark.parametrize(
    ("columns", "renames", "statement"),
    [
        ("c VARCHAR(9) CHARSET latin1, l INT AS (LENGTH(`C`))", "RENAME COLUMN c TO d", "MODIFY d VARCHAR(9)"),
        ("c FLOAT, l TEXT AS (CONCAT(c, 'cc')) STORED", "CHANGE c d FLOAT", "MODIFY d DOUBLE"),
        ("`c-d` FLOAT, l TEXT AS (CONCAT(`c-d`))", "RENAME COLUMN `c-d` TO `e-f`", "MODIFY `e-f` DOUBLE"),
        ("c FLOAT, d INT, l TEXT AS (CONCAT(c))", "RENAME COLUMN c TO d, RENAME COLUMN d TO c", "MODIFY d DOUBLE"),
    ],
)  # fmt: skip
def test_what_is_computed_from_a_renamed_column_follows_it(
    columns: str, renames: str, statement: str
) -> None:
    tracked = after(
        f"id INT PRIMARY KEY, {columns}", f"ALTER TABLE t {renames}", f"ALTER TABLE t {statement}"
    )
    why = tracked.unclear
    assert any(each.startswith("column l is computed from ") for each in why), why


def test_of_a_column_that_came_with_rows_of_the_log_it_is_not_known_what_it_is_computed_from() -> (
    None
):
    table = table_of("id INT PRIMARY KEY, v INT").table
    untold = replace(table, columns=(table.columns[0], replace(table.columns[1], generated=UNTOLD)))
    for statement, unclear in (("ADD x INT, RENAME COLUMN v TO w", False), ("MODIFY id INT", True)):
        tree = read_statement(f"ALTER TABLE t {statement}", "db", dialect=STRICT).tree
        assert isinstance(tree, AlterTable)
        assert bool(altered(untold, tree, Context(COLLATIONS, STRICT)).unclear) is unclear


@pytest.mark.parametrize(
    ("statement", "lost"),
    [
        ("ADD s TIMESTAMP", True),
        ("ADD s TIMESTAMP DEFAULT '2024-01-01'", True),
        ("ADD s TIMESTAMP NULL", False),
        ("ADD s TIMESTAMP NOT NULL", False),
        ("ADD s TIMESTAMP DEFAULT NULL", False),
        ("ADD s DATETIME", False),
        ("MODIFY v TIMESTAMP", True),
    ],
)
def test_a_timestamp_without_null_depends_on_the_session(statement: str, lost: bool) -> None:
    """Without explicit_defaults_for_timestamp it is NOT NULL, and older rows hold the present."""
    after(T, f"ALTER TABLE t {statement}")
    implicit = replace(STRICT, explicit_timestamps=False)
    with pytest.raises(LostError) if lost else contextlib.nullcontext():
        after(T, f"ALTER TABLE t {statement}", dialect=implicit)


@pytest.mark.parametrize(
    "statement",
    ["ADD PERIOD FOR app (v, x)", "ADD UNIQUE (id, app WITHOUT OVERLAPS)"],
)
def test_a_period_of_an_application_is_no_system_versioning(statement: str) -> None:
    tree = read_statement(f"ALTER TABLE t {statement}", "db", dialect=STRICT).tree
    assert isinstance(tree, AlterTable)
    with pytest.raises(LostError):
        altered(table_of(T).table, tree, Context(COLLATIONS, STRICT))


def test_a_text_that_is_converted_and_becomes_too_long_is_a_mediumtext() -> None:
    tracked = after(
        "id INT PRIMARY KEY, c VARCHAR(21000) CHARSET utf8mb3, d VARCHAR(9) CHARSET utf8mb3",
        "ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4",
    )
    shown = [(column.type, column.meta) for column in tracked.table.columns[1:]]
    assert shown == [(Type.BLOB, 3), (Type.VARCHAR, 36)]
    assert not tracked.unclear


@pytest.mark.parametrize(
    "statement",
    [
        "MODIFY c VARCHAR(20)",
        "COMMENT='x', ALGORITHM=COPY",
        "PARTITION BY LIST (id) (PARTITION p VALUES IN (1))",
    ],
)
def test_ignore_takes_rows_away(statement: str) -> None:
    columns = "id INT PRIMARY KEY, c VARCHAR(9) UNIQUE, CHECK (id > 5)"
    assert after(columns, f"ALTER IGNORE TABLE t {statement}").unclear


@pytest.mark.parametrize(
    ("column", "charset", "lost"),
    [
        ("e ENUM('x','é')", "latin1", True),
        ("s SET('x','é') CHARSET latin1", "utf8mb4", True),
        ("s SET('x','é') CHARSET latin1", "latin1", False),
        ("e ENUM('x','é') CHARSET utf8mb3", "utf8mb4", False),
        ("e ENUM('x','y')", "latin1", False),
        ("e ENUM('x','y') CHARSET ucs2", "utf8mb4", True),
    ],
)
def test_members_that_are_other_bytes_in_another_character_set_are_lost(
    column: str, charset: str, lost: bool
) -> None:
    """Seen on MariaDB 10.11 and 11.8: they keep their bytes."""
    with pytest.raises(LostError, match="members") if lost else contextlib.nullcontext():
        after(column, f"ALTER TABLE t CONVERT TO CHARACTER SET {charset}")


@pytest.mark.parametrize(
    "statement",
    ["MODIFY v INT AFTER v", "MODIFY v INT AFTER w, ADD w INT", "CHANGE v w INT AFTER x, CHANGE x z INT FIRST",
     "DROP nobody", "RENAME COLUMN nobody TO w", "MODIFY nobody INT", "ADD a INT AFTER nobody", "ADD v INT", "ADD IF NOT EXISTS v INT UNIQUE",
     "RENAME COLUMN v TO x", "ADD w VARCHAR(3) CHARSET klingon", "CONVERT TO CHARACTER SET DEFAULT",
     "ADD w BLOB COLLATE utf8mb4_bin", "ADD w VARBINARY(9) COLLATE latin1_bin", "MODIFY v BINARY(9) COLLATE latin1_bin",
     "CONVERT TO CHARACTER SET utf8mb4, ADD w VARCHAR(3) BINARY", "ADD w TEXT CHARSET latin1, CONVERT TO CHARACTER SET utf8mb4"],
)  # fmt: skip
def test_what_does_not_fit_the_table_is_lost_not_guessed(statement: str) -> None:
    with pytest.raises(LostError):
        after(T, f"ALTER TABLE t {statement}")


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ("", ""),
        ("KEY (v)", ""),
        ("UNIQUE (v)", "key v is unique"),
        ("UNIQUE k (v, id)", "key k is unique"),
        ("UNIQUE k (id)", ""),
        ("UNIQUE ((v + 1))", "is unique"),
    ],
)
def test_a_copy_with_a_new_unique_key_may_lack_rows(definition: str, why: str) -> None:
    columns = "id INT PRIMARY KEY, v INT"
    before = table_of(columns).table
    copy = table_of(", ".join(filter(None, (columns, definition)))).table
    unclear = "; ".join(taken_over(before, copy, Context()).unclear)
    assert why in unclear if why else not unclear
    assert "not known" in "; ".join(taken_over(before, copy, Context(), keys_known=False).unclear)


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ("ADD w INT, DROP v, MODIFY id BIGINT, ADD KEY (v)", ""),
        ("ENGINE=InnoDB", ""),
        ("DROP v, ADD V INT", "column v was dropped and added"),
        ("RENAME COLUMN v TO id, RENAME COLUMN id TO v", "renamed"),
        ("CHANGE v w INT", "renamed"),
        ("CHANGE v V INT", ""),
        ("ADD UNIQUE (v(3))", "prefixes"),
        ("ADD KEY (v(3))", ""),
    ],
)
def test_what_an_alter_of_a_copy_does_to_columns_of_the_same_name(specs: str, why: str) -> None:
    tree = read_statement(f"ALTER TABLE _t_gho {specs}", "db", dialect=STRICT).tree
    assert isinstance(tree, AlterTable)
    doubt = doubt_of_copy(tree)
    assert why in doubt if why else not doubt


@pytest.mark.parametrize("drop", ["FOREIGN KEY f", "CONSTRAINT f"])
def test_a_foreign_key_that_ends_and_was_not_known_may_have_changed_rows(drop: str) -> None:
    tree = read_statement(f"ALTER TABLE t DROP {drop}", "db", dialect=STRICT).tree
    assert isinstance(tree, AlterTable)
    told = table_of(T).table
    untold = replace(told, columns=tuple(replace(each, generated=UNTOLD) for each in told.columns))
    assert not altered(told, tree, Context(COLLATIONS, STRICT)).unclear
    assert "foreign key" in "; ".join(altered(untold, tree, Context(COLLATIONS, STRICT)).unclear)


def test_a_table_that_is_versioned_no_more_was_followed_wrongly() -> None:
    assert after(T, "ALTER TABLE t DROP SYSTEM VERSIONING").unclear
    assert not after(T, "ALTER TABLE t DROP PERIOD FOR app").unclear


def test_a_copy_by_another_collation_may_lack_rows() -> None:
    before, copy = (
        table_of(f"c VARCHAR(9) COLLATE {name} PRIMARY KEY").table
        for name in ("utf8mb4_bin", "utf8mb4_general_ci")
    )
    assert taken_over(before, copy, Context()).unclear


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        (
            "ADD FOREIGN KEY (v) REFERENCES p (id) on update set null on delete cascade",
            "the foreign key (ON UPDATE SET NULL ON DELETE CASCADE), which",
        ),
        (
            "ADD CONSTRAINT f FOREIGN KEY (v) REFERENCES p (id) ON DELETE SET DEFAULT",
            "the foreign key f (ON DELETE SET DEFAULT), which",
        ),
        ("ADD c INT REFERENCES p (id) ON DELETE CASCADE", "the foreign key (ON DELETE CASCADE)"),
        ("ADD FOREIGN KEY (v) REFERENCES p (id) ON DELETE RESTRICT ON UPDATE NO ACTION", ""),
        ("ADD c INT COMMENT 'FOREIGN KEY x ON DELETE CASCADE'", ""),
        ("ADD SYSTEM VERSIONING", "system-versioned"),
        ("ENGINE = MyISAM", "transactions"),
        ("ADD z YEAR(2)", "YEAR(2)"),
        ("CHANGE v z YEAR(2)", "YEAR(2)"),
        ("ADD z YEAR(4), ADD zz YEAR", ""),
    ],
)
def test_what_makes_a_table_ineligible_is_told(statement: str, fault: str) -> None:
    faults = "; ".join(after(T, f"ALTER TABLE t {statement}").faults)
    assert fault in faults if fault else not faults


def test_one_versioned_column_makes_a_new_table_versioned() -> None:
    faults = table_of("id INT PRIMARY KEY, v INT WITH SYSTEM VERSIONING").faults
    assert "system-versioned" in "; ".join(faults)
    assert not table_of("id INT PRIMARY KEY, v INT WITHOUT SYSTEM VERSIONING").faults


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("INT DEFAULT -5", -5), ("INT DEFAULT '5' COMMENT 'x'", 5), ("BOOL DEFAULT TRUE", 1), ("INT DEFAULT (7)", 7),
        ("INT /*!50000 DEFAULT 3 */", 3), ("INT DEFAULT 0x41", 65), ("INT DEFAULT b'101'", 5), ("INT DEFAULT 5.50", 6),
        ("DATE DEFAULT '2024-2-9'", "2024-02-09"), ("DATE DEFAULT 20240229", "2024-02-29"),
        ("DATETIME DEFAULT '2024-01-01'", "2024-01-01T00:00:00"),
        ("DATETIME(3) DEFAULT '2024-01-01 10:00:00.5'", "2024-01-01T10:00:00.500000"),
        ("DATETIME(2) DEFAULT '2020-01-02 03:04:05.128'", "2020-01-02T03:04:05.120000"),
        ("TIME DEFAULT '10:00'", "10:00:00"), ("TIME DEFAULT 100", "00:01:00"), ("TIME(2) DEFAULT '-1:2:3.4'", "-01:02:03.40"),
        ("VARCHAR(9) DEFAULT _latin1'x'", "x"), ("VARCHAR(9) DEFAULT N'x'", "x"), ("VARCHAR(9) DEFAULT 'a' 'b'", "ab"),
        ("VARCHAR(9) DEFAULT 5.50", "5.50"), ("VARCHAR(9) DEFAULT 0x41", "A"), ("VARCHAR(9) DEFAULT 'a\\nb'", "a\nb"),
        ("VARCHAR(30) DEFAULT 'it''s, (new)' NOT NULL", "it's, (new)"), ("CHAR(5) DEFAULT 'y '", "y"),
        ("VARBINARY(5) DEFAULT 'é'", b64("é".encode())), ("BINARY(3) DEFAULT 'a'", b64(b"a\0\0")),
        ("DECIMAL(65,30) DEFAULT -0.5", "-0." + "5".ljust(30, "0")), ("DECIMAL(10,2) DEFAULT 1.005", "1.01"),
        ("ENUM('new','paid') DEFAULT 'NEW'", "new"), ("ENUM('new','paid') DEFAULT 2", "paid"),
        ("SET('p','q') DEFAULT 'q,p'", "p,q"), ("YEAR DEFAULT 99", 1999), ("YEAR DEFAULT '000'", 2000), ("YEAR DEFAULT '0000'", 0), ("BIT(12) DEFAULT 5", b64(b"\0\5")),
        ("INT NOT NULL", 0), ("VARCHAR(3) NOT NULL", ""), ("ENUM('new','paid') NOT NULL", "new"),
        ("BINARY(2) NOT NULL", b64(b"\0\0")), ("TIME(1) NOT NULL", "00:00:00.0"), ("DECIMAL(4,1) NOT NULL", "0.0"),
        ("INT DEFAULT (1+1)", 2), ("BIGINT DEFAULT (-2 * 3 + 10 - 1)", 3), ("INT DEFAULT (5 - 2 * 2)", 1),
        ("UUID DEFAULT '018f0000-0000-7000-8000-000000000001'", b64(bytes.fromhex("018f0000000070008000000000000001"))),
        ("UUID NOT NULL", b64(bytes(16))), ("INET6 DEFAULT '::1'", b64(bytes(15) + b"\1")),
        ("INET4 DEFAULT '10.0.0.1'", b64(b"\n\0\0\1")),
        ("INT", None), ("INT DEFAULT NULL", None), ("DATE DEFAULT '0000-00-00'", "0000-00-00"),
        ("DATE NOT NULL", "0000-00-00"), ("DATETIME(3) NOT NULL", "0000-00-00T00:00:00"), ("DATE", None),
    ],
)  # fmt: skip
def test_a_constant_default_is_what_rows_hold_that_are_older(declared: str, value: Any) -> None:
    tracked = after(
        "id INT PRIMARY KEY", f"ALTER TABLE t ADD COLUMN IF NOT EXISTS c {declared} AFTER id"
    )
    assert tracked.table.columns[1].initial_default == value
    assert not tracked.unclear


@pytest.mark.parametrize(
    ("connection", "declared", "value"),
    [
        ("latin1", "VARCHAR(9) DEFAULT 'é€'", "é€"),
        ("latin1", "VARCHAR(9) DEFAULT '日'", None),
        ("ascii", "VARCHAR(9) DEFAULT 'é'", None),
        ("ascii", "VARBINARY(9) DEFAULT 'é'", None),
        ("binary", "VARCHAR(9) DEFAULT 'é'", None),
        ("utf8mb3", "VARCHAR(9) DEFAULT '日'", "日"),
        ("utf8mb3", "VARCHAR(9) DEFAULT '😀'", None),
        ("utf16", "VARCHAR(9) DEFAULT 'ab'", "ab"),
        ("utf16", "VARBINARY(9) DEFAULT 'ab'", None),
        ("latin1", "BLOB DEFAULT 'é'", None),
    ],
)
def test_a_constant_has_the_characters_of_its_session(
    connection: str, declared: str, value: str | None
) -> None:
    dialect = replace(STRICT, connection=connection)
    tracked = after("id INT PRIMARY KEY", f"ALTER TABLE t ADD c {declared}", dialect=dialect)
    assert tracked.table.columns[1].initial_default == value
    assert bool(tracked.unclear) is (value is None)


@pytest.mark.parametrize(
    ("declared", "in_strict", "in_lax"),
    [
        ("ENUM('e','é') DEFAULT 'é'", "é", None),
        ("ENUM('b','B') DEFAULT 'B'", "B", None),
        ("ENUM('é','E') DEFAULT 'e'", "E", None),
        ("ENUM('é','e') DEFAULT 'é'", "é", "é"),
        ("ENUM('new','paid') DEFAULT 'PAID'", "paid", "paid"),
        ("SET('b','B','c') DEFAULT 'c,B'", "B,c", None),
        ("SET('b','c') DEFAULT 'c'", "c", "c"),
    ],
)
def test_a_member_is_told_if_no_earlier_one_can_be_equal_to_it(
    declared: str, in_strict: str, in_lax: str | None
) -> None:
    """A lax session may have members that its collation takes for one: the first one counts."""
    statement = f"ALTER TABLE t ADD c {declared}"
    for dialect, value in (STRICT, in_strict), (LAX, in_lax):
        tracked = after("id INT PRIMARY KEY", statement, dialect=dialect)
        assert tracked.table.columns[1].initial_default == value
        assert bool(tracked.unclear) is (value is None)


@pytest.mark.parametrize(
    "declared",
    ["INT DEFAULT (3 / 2)", "INT DEFAULT (1 + id)", "INT DEFAULT (2000000000 + 2000000000)", "VARCHAR(2) DEFAULT 'abc'", "VARCHAR(9) DEFAULT _latin1'é'", "DATE DEFAULT 'nonsense'",
     "INET6 DEFAULT '1.2.3.4'", "INET4 DEFAULT 5", "UUID DEFAULT '018f000000007000-8000000000000001'", "TIMESTAMP DEFAULT 0",
     "FLOAT(5,1) DEFAULT 1.25", "VARCHAR(9) CHARSET latin1 DEFAULT '日'", "INT DEFAULT 1e1", "JSON DEFAULT (json_array())",
     "INT DEFAULT X'31'", "DECIMAL(5,2) DEFAULT x'31'", "DOUBLE DEFAULT X'31'", "BIT(8) DEFAULT X'31'", "INT DEFAULT _binary 0x31"],
)  # fmt: skip
def test_a_value_that_is_not_known_is_never_told(declared: str) -> None:
    tracked = after("id INT PRIMARY KEY", f"ALTER TABLE t ADD c {declared}")
    assert tracked.table.columns[1].initial_default is None
    assert "not known" in tracked.unclear[0]
