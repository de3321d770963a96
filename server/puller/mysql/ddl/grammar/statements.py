"""The grammar of the statements in a log: a tree for each, or none at all. Pure.

Every token is taken by a rule. Where a rule takes a rest unread, that rest is a body that the
statement only stores (a view, a trigger, a grant), or partitions' bounds; what is left makes the
statement one that is not understood.
"""

import itertools
import re
from collections.abc import Callable
from typing import ClassVar, Final

from server.puller.mysql.ddl.grammar.table_changes import TableChangeReader
from server.puller.mysql.ddl.tokens import NotUnderstoodError, Sort
from server.puller.mysql.ddl.tree import (
    AddKey,
    AlterTable,
    ColumnDef,
    CreateTable,
    Dml,
    DropKey,
    DropSchema,
    DropTables,
    Harmless,
    Key,
    RenameTables,
    Savepoint,
    Spec,
    TableName,
    Tree,
    TruncateTable,
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
        UNDO LIBRARY
        """,
    )
)
"""Objects whose CREATE, ALTER and DROP change neither tables nor their rows."""
_SEQUENCE_FLAGS: Final = ("NO", "NOMINVALUE", "NOMAXVALUE", "NOCACHE", "CYCLE", "NOCYCLE")
_SEQUENCE_OPTIONS: Final = (
    "START", "INCREMENT", "MINVALUE", "MAXVALUE", "CACHE", "ENGINE", "COMMENT"
)  # fmt: skip
"""Those with a value."""
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


class StatementReader(TableChangeReader):
    """Reads one statement."""

    sets_sql_mode = False
    """Whether a SET STATEMENT before it sets sql_mode, for its run but not for its lexer."""

    def statement(self) -> Tree:
        """The whole of it.

        Raises:
            NotUnderstoodError: it is of a kind that no rule reads, or goes on behind its end.
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
            variable = self.name()
            while self.skip("."):
                variable = self.name()
            self.sets_sql_mode |= variable.lower() == "sql_mode"
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
        if replace and self.skip("SEQUENCE"):
            return self._replaced_by_sequence()
        if self._sees_any("DEFINER", "ALGORITHM", "SQL", "AGGREGATE") or self._sees_stored():
            return self._stored()
        if self.skip_any("DATABASE", "SCHEMA"):
            return self._replaced_schema() if replace else self._schema_options()
        if self.sees("ROLE") or self.sees("USER"):
            return self._rest("create account")
        temporary = self.skip("TEMPORARY")
        if self.skip("TABLE"):
            return self._create_table(replace=replace, temporary=temporary)
        if self.sees("SEQUENCE"):
            return self._rest("create sequence")
        return self._create_index()

    def _replaced_schema(self) -> DropSchema:
        """CREATE OR REPLACE DATABASE: nothing else tells that its tables are dropped."""
        name = self.as_kept(self.name())
        while self.skip("DEFAULT") or self._sees_any("CHARACTER", "CHARSET", "COLLATE", "COMMENT"):
            if self.skip("CHARACTER"):
                self.expect("SET")
            elif not self.skip_any("CHARSET", "COLLATE", "COMMENT"):
                raise NotUnderstoodError("an option of a database that is not known")
            self.skip("=")
            self.next()
        return DropSchema(name)

    def _replaced_by_sequence(self) -> DropTables:
        """CREATE OR REPLACE SEQUENCE: a table of that name is dropped, and nothing else tells."""
        name = self.table_name()
        while self._sees_any(*_SEQUENCE_FLAGS, *_SEQUENCE_OPTIONS):
            if self.skip_any(*_SEQUENCE_FLAGS):
                continue
            self.skip_any(*_SEQUENCE_OPTIONS)
            self.skip_any("WITH", "BY", "=")
            self.skip("-")
            self.next()
        return DropTables((name,))

    def _stored(self) -> Harmless:
        """CREATE, ALTER or DROP of what is no table: definer and options,
        then the kind of object.
        """
        while not self._sees_stored():
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

    def _sees_stored(self) -> bool:
        # SPATIAL alone is of an index
        return self._sees_any(*_STORED) or self.sees("SPATIAL", "REFERENCE")

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
        if self.sees("(") and not self.query_follows(1):
            self.expect("(")
            self.listed(lambda: self._element(columns, keys, options))
            self.expect(")")
        logs_rows = self.table_options(options)
        self.partitions(options)
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
            options.append(self.period())
            return
        key = self.key()
        if key is not None:
            keys.append(key)
        else:
            columns.append(self.column())

    def _query(self) -> bool:
        """`[IGNORE | REPLACE] [AS] SELECT …`, whose rows are not known here."""
        skipped = self.skip_any("IGNORE", "REPLACE")
        skipped = self.skip_any("AS") or skipped
        if not self.query_follows(0):
            if skipped:
                raise NotUnderstoodError("a query is missing")
            return False
        self.at = len(self.tokens)
        return True

    def _create_index(self) -> AlterTable:
        self.skip_any("ONLINE", "OFFLINE")
        kind = self.skip_any("UNIQUE", "FULLTEXT", "SPATIAL", "VECTOR")
        self.expect("INDEX")
        absent = self.if_not_exists()
        name = self.name()
        self.using()
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
        return AlterTable(name, self.table_changes(), ignore, exists)

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
            return DropSchema(self.as_kept(self.name()))
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
        exists = self.if_exists()
        return RenameTables(self.listed(self._pair), exists)

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
        """RELEASE SAVEPOINT: nothing can go back to the savepoint any more."""
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
