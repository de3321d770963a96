"""The grammar of the changes that one ALTER TABLE makes, commas between them. Pure."""

from collections.abc import Callable, Iterator
from typing import ClassVar, Final

from server.puller.mysql.ddl.grammar.columns import ColumnReader
from server.puller.mysql.ddl.grammar.table_elements import TableOptionReader
from server.puller.mysql.ddl.tokens import NotUnderstoodError, Sort
from server.puller.mysql.ddl.tree import (
    SETS_DEFAULT,
    AddColumn,
    AddKey,
    ChangeColumn,
    Charset,
    DropColumn,
    DropKey,
    MovesRows,
    NoEffect,
    Position,
    RenameColumn,
    RenameKey,
    RenameTable,
    Spec,
    Versioning,
)

_PARTITION_PLAIN: Final = (
    "COALESCE",
    "REORGANIZE",
    "ANALYZE",
    "CHECK",
    "OPTIMIZE",
    "REBUILD",
    "REPAIR",
)


class TableChangeReader(ColumnReader, TableOptionReader):
    """Reads changes of a table."""

    def table_changes(self) -> tuple[Spec, ...]:
        """All changes up to the end of the statement."""
        specs: list[Spec] = []
        if not self.ended and not self.sees(";"):
            self.listed(lambda: specs.extend(self._spec()))
            self._trailing(specs)
        return tuple(specs)

    def _trailing(self, specs: list[Spec]) -> None:
        """Table options need no commas between them, nor do partitions."""
        while (option := self.table_option()) is not None:
            specs.append(option)
            self.skip(",")
        self.partitions(specs)
        if self.skip("REMOVE", "PARTITIONING"):
            specs.append(NoEffect("REMOVE PARTITIONING"))

    def _spec(self) -> Iterator[Spec]:
        begin = self.at
        token = self.peek()
        read = (
            self._SPECS.get(token.text.upper())
            if token is not None and token.sort is Sort.WORD
            else None
        )
        if read is not None:
            self.at += 1
            yield from read(self)
            return
        if self.sees("PARTITION", "BY"):
            options: list[Spec] = []
            self.partitions(options)
            yield from options
            return
        self.at = begin
        option = self.table_option()
        if option is None:
            raise NotUnderstoodError(
                f"{token.text if token else ''!r} is no change of a table that is known"
            )
        yield option
        while (option := self.table_option()) is not None:
            yield option

    def _add(self) -> Iterator[Spec]:
        if self.skip("PARTITION"):
            self.if_not_exists()
            self.skip_any("NO_WRITE_TO_BINLOG", "LOCAL")
            if self.skip("PARTITIONS"):
                self.number()
            else:
                self.parentheses()
            yield NoEffect("ADD PARTITION")
        elif self.skip("SYSTEM", "VERSIONING"):
            yield Versioning(adds=True)
        elif self.skip("PERIOD", "FOR"):
            self.if_not_exists()
            yield self.period()
        elif self.skip("COLUMN"):
            yield from self._add_columns()
        elif (key := self.key()) is not None:
            yield AddKey(key)
        else:
            yield from self._add_columns()

    def _add_columns(self) -> Iterator[Spec]:
        absent = self.if_not_exists()
        if not self.skip("("):
            column = self.column()
            yield AddColumn(column, self._position(), absent)
            return
        while True:
            key = self.key()
            yield AddKey(key) if key is not None else AddColumn(self.column(), None, absent)
            if not self.skip(","):
                break
        self.expect(")")

    def _position(self) -> Position | None:
        if self.skip("FIRST"):
            return Position(None)
        return Position(self.column_name()) if self.skip("AFTER") else None

    def _drop_spec(self) -> Iterator[Spec]:
        if self.skip("PARTITION"):
            self.if_exists()
            self.listed(self.name)
            yield MovesRows()
        elif self.skip("SYSTEM", "VERSIONING"):
            yield Versioning(adds=False)
        elif self.skip("PERIOD", "FOR"):
            self.if_exists()
            system = self.name().upper() == "SYSTEM_TIME"
            yield Versioning(adds=False) if system else NoEffect("DROP PERIOD")
        elif self.skip("PRIMARY", "KEY"):
            yield DropKey("primary")
        elif self.skip("FOREIGN", "KEY"):
            exists = self.if_exists()
            yield DropKey("foreign", self.name(), exists)
        elif word := self.skip_any("INDEX", "KEY", "CONSTRAINT", "CHECK"):
            kind = {"INDEX": "key", "KEY": "key"}.get(word, word.lower())
            exists = self.if_exists()
            yield DropKey(kind, self.name(), exists)
        else:
            self.skip("COLUMN")
            exists = self.if_exists()
            yield DropColumn(self.column_name(), exists)
            self.skip_any("RESTRICT", "CASCADE")

    def _change(self) -> Iterator[Spec]:
        self.skip("COLUMN")
        exists = self.if_exists()
        old = self.column_name()
        column = self.column()
        yield ChangeColumn(old, column, self._position(), exists)

    def _modify(self) -> Iterator[Spec]:
        self.skip("COLUMN")
        exists = self.if_exists()
        column = self.column()
        yield ChangeColumn(column.name, column, self._position(), exists)

    def _rename_spec(self) -> Iterator[Spec]:
        if self.skip("COLUMN"):
            exists = self.if_exists()
            old = self.column_name()
            self.expect("TO")
            yield RenameColumn(old, self.name(), exists)
        elif self.skip_any("INDEX", "KEY"):
            exists = self.if_exists()
            old = self.name()
            self.expect("TO")
            yield RenameKey(old, self.name(), exists)
        else:
            self.skip_any("TO", "AS", "=")
            yield RenameTable(self.table_name())

    def _alter_spec(self) -> Iterator[Spec]:
        if self.skip_any("INDEX", "KEY"):
            self.if_exists()
            self.name()
            if not self.skip_any("VISIBLE", "INVISIBLE", "IGNORED"):
                self.expect("NOT", "IGNORED")
            yield NoEffect("ALTER INDEX")
            return
        if self.skip_any("CHECK", "CONSTRAINT"):
            self.name()
            self.skip("NOT")
            self.expect("ENFORCED")
            yield NoEffect("ALTER CHECK")
            return
        self.skip("COLUMN")
        self.if_exists()
        self.column_name()
        if self.skip("SET", "DEFAULT"):
            self.default()
            yield SETS_DEFAULT
        elif self.skip("DROP", "DEFAULT"):
            yield SETS_DEFAULT
        else:
            self.expect("SET")
            if not self.skip_any("VISIBLE", "INVISIBLE"):
                raise NotUnderstoodError("an unknown change of a column")
            yield NoEffect("ALTER COLUMN")

    def _convert(self) -> Iterator[Spec]:
        if self.skip("PARTITION"):
            self.name()
            self.expect("TO", "TABLE")
            yield MovesRows(self.table_name(), "filled")
            self._validation()
            return
        if self.skip("TABLE"):
            other = self.table_name()
            self.expect("TO", "PARTITION")
            self.name()
            if self.skip("VALUES"):
                self._partition_values()
            yield MovesRows(other, "dropped")
            self._validation()
            return
        self.expect("TO")
        if not (self.skip("CHARACTER", "SET") or self.skip("CHARSET") or self.skip("CHAR", "SET")):
            raise NotUnderstoodError("CONVERT TO something else than a character set")
        self.skip("=")
        charset = "" if self.skip("DEFAULT") else self.charset()
        yield Charset(charset, self.collation(), converts=True)

    def _partition_values(self) -> None:
        if self.skip("IN"):
            self.parentheses()
            return
        self.expect("LESS", "THAN")
        if not self.skip("MAXVALUE"):
            self.parentheses()

    def _validation(self) -> None:
        if self.skip("WITH") or self.skip("WITHOUT"):
            self.expect("VALIDATION")

    def _exchange(self) -> Iterator[Spec]:
        self.expect("PARTITION")
        self.name()
        self.expect("WITH", "TABLE")
        yield MovesRows(self.table_name(), "moved")
        self._validation()

    def _truncate_spec(self) -> Iterator[Spec]:
        self.expect("PARTITION")
        self.listed(self.name)
        yield MovesRows()

    def _tablespace(self) -> Iterator[Spec]:
        """DISCARD, IMPORT."""
        if self.skip("PARTITION"):
            self.listed(self.name)
        self.expect("TABLESPACE")
        yield MovesRows()

    def _partition_spec(self) -> Iterator[Spec]:
        """Read a change of partitions that moves rows between them only."""
        what = self.tokens[self.at - 1].text.upper()
        self.expect("PARTITION")
        self.skip_any("NO_WRITE_TO_BINLOG", "LOCAL")
        if what == "COALESCE":
            self.number()
        elif what != "REORGANIZE" or not self.ended:
            self.listed(self.name)
            if self.skip("INTO"):
                self.parentheses()
            else:
                while self.skip_any(
                    "EXTENDED", "QUICK", "FAST", "MEDIUM", "CHANGED", "FOR", "UPGRADE"
                ):
                    pass
        yield NoEffect(f"{what} PARTITION")

    def _order(self) -> Iterator[Spec]:
        self.expect("BY")
        self.listed(lambda: (self.column_name(), self.skip_any("ASC", "DESC")))
        yield NoEffect("ORDER BY")

    def _keys(self) -> Iterator[Spec]:
        """ENABLE, DISABLE KEYS."""
        self.expect("KEYS")
        yield NoEffect("KEYS")

    def _assigned(self) -> Iterator[Spec]:
        """ALGORITHM, LOCK."""
        self.skip("=")
        self.name()
        yield NoEffect("ALGORITHM")

    def _plain_spec(self) -> Iterator[Spec]:
        yield NoEffect(self.tokens[self.at - 1].text.upper())

    def _validation_spec(self) -> Iterator[Spec]:
        if self.tokens[self.at - 1].is_word("WITH") and self.skip("SYSTEM", "VERSIONING"):
            yield Versioning(adds=True)
            return
        self.expect("VALIDATION")
        yield NoEffect("VALIDATION")

    def _remove(self) -> Iterator[Spec]:
        self.expect("PARTITIONING")
        yield NoEffect("REMOVE PARTITIONING")

    _SPECS: ClassVar[dict[str, Callable[["TableChangeReader"], Iterator[Spec]]]] = {
        "ADD": _add,
        "DROP": _drop_spec,
        "CHANGE": _change,
        "MODIFY": _modify,
        "RENAME": _rename_spec,
        "ALTER": _alter_spec,
        "CONVERT": _convert,
        "EXCHANGE": _exchange,
        "TRUNCATE": _truncate_spec,
        "DISCARD": _tablespace,
        "IMPORT": _tablespace,
        "ORDER": _order,
        "ENABLE": _keys,
        "DISABLE": _keys,
        "ALGORITHM": _assigned,
        "LOCK": _assigned,
        "FORCE": _plain_spec,
        "SECONDARY_LOAD": _plain_spec,
        "SECONDARY_UNLOAD": _plain_spec,
        "WITH": _validation_spec,
        "WITHOUT": _validation_spec,
        "REMOVE": _remove,
        **dict.fromkeys(_PARTITION_PLAIN, _partition_spec),
    }
