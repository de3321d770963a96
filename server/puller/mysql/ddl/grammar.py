"""The grammar of the statements in a log: a tree for each, or none at all. Pure.

Every token is taken by a rule. Where a rule takes a rest unread, that rest is a body that the
statement only stores (a view, a trigger, a grant), or partitions' bounds; what is left makes the
statement one that is not understood.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

from server.puller.mysql.ddl.column_grammar import ColumnReader
from server.puller.mysql.ddl.tokens import NotUnderstoodError, Sort
from server.puller.mysql.ddl.tree import (
    AddColumn,
    AddKey,
    AlterTable,
    ChangeColumn,
    Charset,
    ColumnDef,
    CreateTable,
    Dml,
    DropColumn,
    DropKey,
    DropSchema,
    DropTables,
    Engine,
    Harmless,
    Key,
    MovesRows,
    NoEffect,
    Position,
    RenameColumn,
    RenameKey,
    RenameTable,
    RenameTables,
    Savepoint,
    Spec,
    TableName,
    Tree,
    TruncateTable,
    Versioning,
)

ROW_VERBS: Final = frozenset(
    {
        "INSERT",
        "UPDATE",
        "DELETE",
        "REPLACE",
        "LOAD",
        "CALL",
        "WITH",
        "DO",
        "SELECT",
        "VALUES",
        "HANDLER",
        "EXECUTE",
    }
)
_STORED: Final = frozenset(
    re.findall(
        r"\w+",
        """
        VIEW TRIGGER PROCEDURE FUNCTION EVENT PACKAGE USER ROLE SERVER SEQUENCE TABLESPACE LOGFILE RESOURCE
        SPATIAL UNDO LIBRARY
        """,
    )
)
"""Objects whose CREATE, ALTER and DROP change neither tables nor their rows."""
_ACCOUNTS: Final = ("GRANT", "REVOKE")
_MAINTAINS: Final = ("ANALYZE", "OPTIMIZE", "REPAIR", "CHECK", "CHECKSUM")
_SERVER: Final = (
    "FLUSH",
    "RESET",
    "PURGE",
    "INSTALL",
    "UNINSTALL",
    "KILL",
    "SHUTDOWN",
    "SHOW",
    "HELP",
    "USE",
)
_SET_ACCOUNTS: Final = ("PASSWORD", "ROLE", "DEFAULT", "RESOURCE")
_PLAIN_OPTIONS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        AUTO_INCREMENT AVG_ROW_LENGTH CHECKSUM TABLE_CHECKSUM COMMENT COMPRESSION CONNECTION DELAY_KEY_WRITE
        ENCRYPTION ENGINE_ATTRIBUTE SECONDARY_ENGINE_ATTRIBUTE SECONDARY_ENGINE INSERT_METHOD KEY_BLOCK_SIZE
        MAX_ROWS MIN_ROWS PACK_KEYS PASSWORD ROW_FORMAT STATS_AUTO_RECALC STATS_PERSISTENT
        STATS_SAMPLE_PAGES TRANSACTIONAL TYPE AUTOEXTEND_SIZE PAGE_CHECKSUM PAGE_COMPRESSED
        PAGE_COMPRESSION_LEVEL ENCRYPTED ENCRYPTION_KEY_ID IETF_QUOTES SEQUENCE NODEGROUP
        """,
    )
)
_PARTITION_ROWS: Final = ("DROP", "TRUNCATE")
_PARTITION_PLAIN: Final = (
    "COALESCE",
    "REORGANIZE",
    "ANALYZE",
    "CHECK",
    "OPTIMIZE",
    "REBUILD",
    "REPAIR",
)


class StatementReader(ColumnReader):
    """Reads one statement."""

    def statement(self) -> Tree:
        """The whole of it.

        Raises:
            NotUnderstoodError: it, or its end, is another one than is known.
        """
        while self.skip("SET", "STATEMENT"):
            self._variables()
        tree = self._statement()
        self.skip(";")
        if not self.ended:
            raise NotUnderstoodError(f"{self.tokens[self.at].text!r} is left")
        return tree

    def _variables(self) -> None:
        """`name = value, … FOR`: what is set for this statement only."""
        while not self.skip("FOR"):
            self.name()
            while self.skip("."):
                self.name()
            self.expect("=")
            while not (self.sees(",") or self.sees("FOR")):
                if self.sees("("):
                    self.parentheses()
                else:
                    self.next()
            self.skip(",")

    def _statement(self) -> Tree:
        token = self.peek()
        if token is None or self.sees(";"):
            return Harmless("nothing")
        verb = token.text.upper() if token.sort is not Sort.NAME else ""
        if verb in ROW_VERBS or verb == "(":
            return self._dml(verb)
        self.at += 1
        read = self._STATEMENTS.get(verb)
        if read is None:
            raise NotUnderstoodError(f"{token.text!r} is no statement that is known")
        return read(self)

    def _rest(self, what: str) -> Harmless:
        """A statement that stores what follows, or sends it to an account: nothing of it runs."""
        self.at = len(self.tokens)
        return Harmless(what)

    # Rows

    def _dml(self, verb: str) -> Dml:
        """Only a single base table is a sure target;
        a rest of any kind may call what changes others.
        """
        tokens = self.tokens
        calls = frozenset(
            token.text.lower()
            for token, after in itertools.pairwise(tokens)
            if token.sort in (Sort.WORD, Sort.NAME)
            and after.sort is Sort.SYMBOL
            and after.text == "("
        )
        self.at += 1
        try:
            target = self._dml_target(verb)
        except NotUnderstoodError:
            target = None
        self.at = len(tokens)
        return Dml(verb, target, calls)

    def _dml_target(self, verb: str) -> TableName | None:
        if verb in ("INSERT", "REPLACE"):
            while self.skip_any("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE"):
                pass
            self.skip("INTO")
            return self.table_name()
        if verb == "DELETE":
            while self.skip_any("LOW_PRIORITY", "QUICK", "IGNORE", "HISTORY"):
                pass
            if not self.skip("FROM"):
                return None
            target = self.table_name()
            return (
                target
                if self.ended or self.sees(";") or self._sees_any("WHERE", "ORDER", "LIMIT")
                else None
            )
        if verb == "UPDATE":
            while self.skip_any("LOW_PRIORITY", "IGNORE"):
                pass
            target = self.table_name()
            return target if self.sees("SET") else None
        return None

    def _sees_any(self, *texts: str) -> bool:
        return any(self.sees(text) for text in texts)

    # CREATE

    def _create(self) -> Tree:
        replace = self.skip("OR", "REPLACE")
        if self._sees_any("DEFINER", "ALGORITHM", "SQL", "AGGREGATE") or self._sees_any(*_STORED):
            return self._stored()
        if self.skip_any("DATABASE", "SCHEMA"):
            return self._schema_options()
        if self.sees("ROLE") or self.sees("USER"):
            return self._rest("create account")
        temporary = self.skip("TEMPORARY")
        if self.skip("TABLE"):
            return self._create_table(replace=replace, temporary=temporary)
        if self.sees("SEQUENCE"):
            return self._rest("create sequence")
        return self._create_index()

    def _stored(self) -> Harmless:
        """CREATE, ALTER or DROP of what is no table: definer and options,
        then the kind of object.
        """
        while not self._sees_any(*_STORED):
            option = self.skip_any("DEFINER", "ALGORITHM", "SQL", "AGGREGATE")
            if option in ("DEFINER", "ALGORITHM"):
                self.expect("=")
                self._account()
            elif option == "SQL":
                self.expect("SECURITY")
                self.name()
            elif not option:
                raise NotUnderstoodError("an object that is not known")
        what = self.next().text.lower()
        if what == "undo":
            self.expect("TABLESPACE")
        elif what == "spatial":
            self.expect("REFERENCE", "SYSTEM")
        return self._rest(what)

    def _account(self) -> None:
        """`'u'@'h'`, `CURRENT_USER()`, or one word."""
        self.next()
        if self.sees("("):
            self.parentheses()
        if self.skip("@"):
            self.next()

    def _schema_options(self) -> Harmless:
        """CREATE and ALTER DATABASE: nothing but defaults for tables that come later."""
        return self._rest("database")

    def _create_table(self, *, replace: bool, temporary: bool) -> CreateTable:
        absent = self.if_not_exists()
        name = self.table_name()
        like = None
        if self.skip("LIKE"):
            like = self.table_name()
        elif self.skip("(", "LIKE"):
            like = self.table_name()
            self.expect(")")
        if like is not None:
            return CreateTable(
                name, replace=replace, temporary=temporary, if_not_exists=absent, like=like
            )
        columns: list[ColumnDef] = []
        keys: list[Key] = []
        options: list[Spec] = []
        if self.sees("(") and not self._query_follows(1):
            self.expect("(")
            self.listed(lambda: self._element(columns, keys, options))
            self.expect(")")
        logs_rows = self._table_options(options)
        self._partitions(options)
        logs_rows |= self.skip("START", "TRANSACTION")
        selects = self._query()
        return CreateTable(
            name,
            tuple(columns),
            tuple(keys),
            tuple(options),
            replace,
            temporary,
            absent,
            None,
            selects,
            logs_rows,
        )

    def _element(self, columns: list[ColumnDef], keys: list[Key], options: list[Spec]) -> None:
        if self.skip("PERIOD", "FOR"):
            options.append(Versioning(adds=self.sees("SYSTEM_TIME")))
            self.name()
            self.parentheses()
            return
        key = self.key()
        if key is not None:
            keys.append(key)
        else:
            columns.append(self.column())

    def _query_follows(self, ahead: int) -> bool:
        while (
            (token := self.peek(ahead)) is not None
            and token.sort is Sort.SYMBOL
            and token.text == "("
        ):
            ahead += 1
        token = self.peek(ahead)
        return token is not None and token.is_word("SELECT", "WITH", "VALUES", "TABLE")

    def _query(self) -> bool:
        """`[IGNORE | REPLACE] [AS] SELECT …`, whose rows are not known here."""
        skipped = self.skip_any("IGNORE", "REPLACE")
        skipped = self.skip_any("AS") or skipped
        if not self._query_follows(0):
            if skipped:
                raise NotUnderstoodError("a query is missing")
            return False
        self.at = len(self.tokens)
        return True

    def _table_options(self, options: list[Spec]) -> bool:
        """Options until none comes; whether START TRANSACTION was among them."""
        logs_rows = False
        while True:
            self.skip(",")
            if self.skip("START", "TRANSACTION"):
                logs_rows = True
                continue
            option = self._table_option()
            if option is None:
                return logs_rows
            options.append(option)

    def _table_option(self) -> Spec | None:
        """One option, if one comes."""
        begin = self.at
        self.skip("DEFAULT")
        if self.skip("CHARACTER", "SET") or self.skip("CHARSET") or self.skip("CHAR", "SET"):
            self.skip("=")
            charset = self.charset()
            return Charset(charset, self._collation())
        if self.sees("COLLATE"):
            return Charset("", self._collation())
        if self.at != begin:
            raise NotUnderstoodError("an unknown default")
        if self.skip("ENGINE") or self.skip("STORAGE", "ENGINE"):
            self.skip("=")
            return Engine(self.charset())
        if self.skip("WITH", "SYSTEM", "VERSIONING"):
            return Versioning(adds=True)
        if self.skip("UNION"):
            self.skip("=")
            self.parentheses()
            return NoEffect("UNION")
        if self.skip_any("DATA", "INDEX") and (self.skip("DIRECTORY") or self._none(begin)):
            self.skip("=")
            self.string()
            return NoEffect("DIRECTORY")
        if self.skip("TABLESPACE"):
            self.skip("=")
            self.name()
            if self.skip("STORAGE"):
                self.next()
            return NoEffect("TABLESPACE")
        self.at = begin
        return self._other_option()

    def _none(self, begin: int) -> bool:
        self.at = begin
        return False

    def _collation(self) -> str:
        self.skip("DEFAULT")
        if not self.skip("COLLATE"):
            return ""
        self.skip("=")
        return self.charset()

    def _other_option(self) -> Spec | None:
        """An option that changes no data: one that is known, or an engine's own `name = value`."""
        token = self.peek()
        if token is None or token.sort not in (Sort.WORD, Sort.NAME):
            return None
        plain = token.is_word(*_PLAIN_OPTIONS)
        following = self.peek(1)
        assigned = following is not None and following.sort is Sort.SYMBOL and following.text == "="
        if not plain and not assigned:
            return None
        self.at += 1 + assigned
        self._option_value()
        return NoEffect(token.text.upper())

    def _option_value(self) -> None:
        token = self.next()
        if token.sort is Sort.SYMBOL:
            if token.text != "-":
                raise NotUnderstoodError("an option without a value")
            self.next()

    def _partitions(self, options: list[Spec]) -> None:
        """PARTITION BY …: where rows are kept, not which there are."""
        if not self.skip("PARTITION", "BY"):
            return
        options.append(NoEffect("PARTITION BY"))
        self._partition_kind(options)
        if self.skip("PARTITIONS"):
            self.number()
        if self.skip("SUBPARTITION", "BY"):
            self._partition_kind(options)
            if self.skip("SUBPARTITIONS"):
                self.number()
        if self.sees("(") and not self._query_follows(0):
            self.parentheses()

    def _partition_kind(self, options: list[Spec]) -> None:
        self.skip("LINEAR")
        kind = self.skip_any("HASH", "KEY", "RANGE", "LIST", "SYSTEM_TIME")
        if kind == "SYSTEM_TIME":
            options.append(Versioning(adds=True))
            while not (self.ended or self.sees("(") or self.sees("PARTITIONS")):
                self.next()
            return
        if not kind:
            raise NotUnderstoodError("an unknown kind of partitions")
        if kind == "KEY" and self.skip("ALGORITHM"):
            self.expect("=")
            self.number()
        self.skip("COLUMNS")
        self.parentheses()

    def _create_index(self) -> AlterTable:
        self.skip_any("ONLINE", "OFFLINE")
        kind = self.skip_any("UNIQUE", "FULLTEXT", "SPATIAL")
        self.expect("INDEX")
        absent = self.if_not_exists()
        name = self.name()
        self._using()
        self.expect("ON")
        table = self.table_name()
        self.wait()
        parts = self.key_parts()
        self.key_options()
        self._algorithm_and_lock()
        key = Key("unique" if kind == "UNIQUE" else "plain", name, parts, if_not_exists=absent)
        return AlterTable(table, (AddKey(key),))

    def _algorithm_and_lock(self) -> None:
        self.wait()
        while self.skip_any("ALGORITHM", "LOCK"):
            self.skip("=")
            self.name()

    # ALTER

    def _alter(self) -> Tree:
        ignore = False
        while word := self.skip_any("ONLINE", "OFFLINE", "IGNORE"):
            ignore |= word == "IGNORE"
        if self.skip_any("DATABASE", "SCHEMA"):
            return self._schema_options()
        if not self.skip("TABLE"):
            if self.skip("INSTANCE"):
                return self._rest("instance")
            return self._stored()
        exists = self.if_exists()
        name = self.table_name()
        self.wait()
        specs: list[Spec] = []
        if not self.ended and not self.sees(";"):
            self.listed(lambda: specs.extend(self._spec()))
            self._trailing(specs)
        return AlterTable(name, tuple(specs), ignore, exists)

    def _trailing(self, specs: list[Spec]) -> None:
        """Table options need no commas between them, nor do partitions."""
        while (option := self._table_option()) is not None:
            specs.append(option)
            self.skip(",")
        self._partitions(specs)
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
            self._partitions(options)
            yield from options
            return
        self.at = begin
        option = self._table_option()
        if option is None:
            raise NotUnderstoodError(
                f"{token.text if token else ''!r} is no change of a table that is known"
            )
        yield option
        while (option := self._table_option()) is not None:
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
        elif self.skip("SYSTEM", "VERSIONING") or self.sees("PERIOD", "FOR"):
            if self.skip("PERIOD", "FOR"):
                self.name()
                self.parentheses()
            yield Versioning(adds=True)
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
            self.name()
            yield Versioning(adds=False)
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
        elif not self.skip("DROP", "DEFAULT"):
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
        yield Charset(charset, self._collation(), converts=True)

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
        """What moves rows between partitions only."""
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

    # DROP and others

    def _drop(self) -> Tree:
        temporary = self.skip("TEMPORARY")
        if self.skip_any("TABLE", "TABLES"):
            self.if_exists()
            names = self.listed(self.table_name)
            self.wait()
            self.skip_any("RESTRICT", "CASCADE")
            return DropTables(names, temporary)
        if temporary and self.sees("SEQUENCE"):
            return self._rest("sequence")
        if self.skip_any("DATABASE", "SCHEMA"):
            self.if_exists()
            return DropSchema(self.folded(self.name()))
        if self.skip("PREPARE"):
            return self._rest("prepare")
        self.skip_any("ONLINE", "OFFLINE")
        if not self.skip("INDEX"):
            return self._stored()
        exists = self.if_exists()
        name = self.name()
        self.expect("ON")
        table = self.table_name()
        self._algorithm_and_lock()
        primary = name.upper() == "PRIMARY"
        return AlterTable(table, (DropKey("primary") if primary else DropKey("key", name, exists),))

    def _rename(self) -> Tree:
        if self.skip("USER"):
            return self._rest("rename user")
        if not self.skip_any("TABLE", "TABLES"):
            raise NotUnderstoodError("RENAME of something else than tables")
        self.if_exists()
        return RenameTables(self.listed(self._pair))

    def _pair(self) -> tuple[TableName, TableName]:
        old = self.table_name()
        self.wait()
        self.expect("TO")
        return old, self.table_name()

    def _truncate(self) -> TruncateTable:
        self.skip("TABLE")
        name = self.table_name()
        self.wait()
        return TruncateTable(name)

    def _maintains(self) -> Harmless:
        """ANALYZE TABLE and the like; MariaDB's ANALYZE runs the statement that follows,
        if one does.
        """
        self.skip_any("NO_WRITE_TO_BINLOG", "LOCAL")
        if not self.skip_any("TABLE", "TABLES"):
            raise NotUnderstoodError("it may run another statement")
        return self._rest("maintenance")

    def _set(self) -> Harmless:
        """SET of an account; values of variables may be computed by functions,
        which may change rows.
        """
        if not self._sees_any(*_SET_ACCOUNTS):
            raise NotUnderstoodError("SET of something else than an account")
        if self.sees("DEFAULT") and not self.sees("DEFAULT", "ROLE"):
            raise NotUnderstoodError("SET of something else than an account")
        return self._rest("account")

    def _server(self) -> Harmless:
        return self._rest("server")

    def _savepoint(self) -> Savepoint:
        return Savepoint(self.name())

    def _release(self) -> Harmless:
        """Nothing can go back to it any more."""
        self.expect("SAVEPOINT")
        self.name()
        return Harmless("savepoint")

    def _roll_back(self) -> Savepoint:
        """A plain ROLLBACK is read elsewhere."""
        self.skip("WORK")
        self.expect("TO")
        if self.peek(1) is not None:
            self.skip("SAVEPOINT")
        return Savepoint(self.name(), undoes=True)

    _STATEMENTS: ClassVar[dict[str, Callable[["StatementReader"], Tree]]] = {
        "CREATE": _create,
        "ALTER": _alter,
        "DROP": _drop,
        "RENAME": _rename,
        "TRUNCATE": _truncate,
        "SET": _set,
        "SAVEPOINT": _savepoint,
        "RELEASE": _release,
        "ROLLBACK": _roll_back,
        **dict.fromkeys((*_ACCOUNTS, *_SERVER), _server),
        **dict.fromkeys(_MAINTAINS, _maintains),
    }
    _SPECS: ClassVar[dict[str, Callable[["StatementReader"], Iterator[Spec]]]] = {
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
