"""The grammar of MySQL's and MariaDB's statements, as far as it says which tables they touch. Pure.

sqlglot cuts a statement into tokens; columns, options and bodies are skipped over.
"""

import re
from collections.abc import Iterator
from typing import ClassVar, Final

from sqlglot.dialects.mysql import MySQL
from sqlglot.tokenizer_core import Token, TokenType

from server.puller.mysql.statement import Action, Kind, Statement, TableName, Verb

ROW_VERBS: Final = frozenset(
    {"INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "CALL", "WITH", "DO", "SELECT", "VALUES"}
)
_HARMLESS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        ANALYZE BINLOG CHANGE CHECK CHECKSUM COMMENT DEALLOCATE EXECUTE EXPLAIN FLUSH GRANT HELP INSTALL KILL LOCK
        OPTIMIZE PREPARE PURGE REPAIR RESET REVOKE SAVEPOINT SET SHOW SHUTDOWN START STOP UNINSTALL UNLOCK USE
        RELEASE BACKUP CACHE
        """,
    )
)
_HARMLESS_OBJECTS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        VIEW TRIGGER PROCEDURE FUNCTION EVENT USER ROLE SERVER SEQUENCE PACKAGE TABLESPACE LOGFILE RESOURCE INSTANCE
        UNDO SPATIAL_REFERENCE AGGREGATE DEFINER ALGORITHM SQL
        """,
    )
)
_BEFORE_INDEX: Final = frozenset({"UNIQUE", "FULLTEXT", "SPATIAL", "ONLINE", "OFFLINE"})
_MOVES_ROWS: Final = frozenset({"DROP", "TRUNCATE", "EXCHANGE", "CONVERT"})


class Words(MySQL):
    """MySQL's tokens, for statements too that sqlglot keeps as one piece of text."""

    class Tokenizer(MySQL.Tokenizer):
        """The rest of no statement is one token."""

        COMMANDS: ClassVar[set[TokenType]] = set()


class NotUnderstoodError(Exception):
    """The grammar goes another way than we know."""


class StatementReader:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[Token], schema: str, *, fold_case: bool) -> None:
        self._tokens = tokens
        self._schema = schema
        self._fold_case = fold_case
        self._at = 0

    def words(self) -> frozenset[str]:
        """All names and keywords, in lower case."""
        return frozenset(token.text.lower() for token in self._tokens)

    def statement(self) -> Statement:
        """The whole statement."""
        if not self._tokens:
            return Statement(Kind.NOTHING)
        verb = self._next().text.upper()
        if verb in ROW_VERBS or verb == "(":
            return Statement(Kind.ROWS)
        if verb in _HARMLESS:
            return Statement(Kind.NOTHING)
        read = {
            "CREATE": self._create,
            "ALTER": self._alter,
            "DROP": self._drop,
            "RENAME": self._rename,
            "TRUNCATE": self._truncate,
        }.get(verb)
        if read is None:
            raise NotUnderstoodError
        actions = tuple(read())
        return Statement(Kind.DDL if actions else Kind.NOTHING, actions)

    def _create(self) -> Iterator[Action]:
        replace = self._skip("OR", "REPLACE")
        if self._skip("TEMPORARY"):
            return
        while self._peek() in _BEFORE_INDEX:
            self._at += 1
        if self._skip("INDEX"):
            yield from self._index()
        elif self._skip("TABLE"):
            self._skip("IF", "NOT", "EXISTS")
            name = self._name()
            if replace:
                yield Action(Verb.DROPPED, name)
            yield Action(Verb.CREATED, name)
        else:
            self._harmless("DATABASE", "SCHEMA")

    def _alter(self) -> Iterator[Action]:
        ignores = False
        while self._peek() in ("ONLINE", "OFFLINE", "IGNORE"):
            ignores |= self._next().text.upper() == "IGNORE"
        if not self._skip("TABLE"):
            self._harmless("DATABASE", "SCHEMA")
            return
        self._skip("IF", "EXISTS")
        name = self._name()
        self._wait()
        renamed: TableName | None = None
        for spec in self._specs():
            renamed = self._spec_rename(spec) or renamed
            if _moves_rows(spec) or (ignores and _is_unique(spec)):
                yield Action(Verb.ROWS_MOVED, name)
                yield from self._other_table(spec)
        yield Action(Verb.ALTERED, name)
        if renamed:
            yield Action(Verb.RENAMED, name, renamed)

    def _drop(self) -> Iterator[Action]:
        if self._skip("TEMPORARY"):
            return
        if self._skip("TABLE") or self._skip("TABLES"):
            self._skip("IF", "EXISTS")
            yield Action(Verb.DROPPED, self._name())
            while self._skip(","):
                yield Action(Verb.DROPPED, self._name())
            return
        while self._peek() in _BEFORE_INDEX:
            self._at += 1
        if self._skip("INDEX"):
            yield from self._index()
        elif self._skip("DATABASE") or self._skip("SCHEMA"):
            self._skip("IF", "EXISTS")
            yield Action(Verb.SCHEMA_DROPPED, (self._part(), ""))
        else:
            self._harmless("PREPARE")

    def _rename(self) -> Iterator[Action]:
        if not (self._skip("TABLE") or self._skip("TABLES")):
            self._harmless("USER")
            return
        self._skip("IF", "EXISTS")
        while True:
            old = self._name()
            self._wait()
            self._expect("TO")
            yield Action(Verb.RENAMED, old, self._name())
            if not self._skip(","):
                return

    def _truncate(self) -> Iterator[Action]:
        self._skip("TABLE")
        yield Action(Verb.TRUNCATED, self._name())

    def _index(self) -> Iterator[Action]:
        """`… name … ON table …`: keys may change."""
        while not self._skip("ON"):
            self._next()
        yield Action(Verb.ALTERED, self._name())

    def _specs(self) -> Iterator[list[Token]]:
        """What follows the name in ALTER TABLE, cut at the commas that are in no parentheses."""
        depth, spec = 0, list[Token]()
        for token in self._tokens[self._at :]:
            depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
            if depth == 0 and token.token_type is TokenType.COMMA:
                yield spec
                spec = []
            else:
                spec.append(token)
        yield spec

    def _spec_rename(self, spec: list[Token]) -> TableName | None:
        if not spec or not _is(spec[0], "RENAME") or (len(spec) > 1 and _is(spec[1], "COLUMN", "INDEX", "KEY")):
            return None
        rest = StatementReader(spec, self._schema, fold_case=self._fold_case)
        rest._at = 1
        if rest._peek() in ("TO", "AS", "="):
            rest._at += 1
        return rest._name()

    def _other_table(self, spec: list[Token]) -> Iterator[Action]:
        """The table that partitions are exchanged with, made of or made into."""
        places = [place for place, token in enumerate(spec) if _is(token, "TABLE")]
        if places:
            rest = StatementReader(spec[places[0] + 1 :], self._schema, fold_case=self._fold_case)
            verb = Verb.ROWS_MOVED if _is(spec[0], "EXCHANGE") else Verb.DROPPED if places[0] == 1 else Verb.FILLED
            yield Action(verb, rest._name())

    def _name(self) -> TableName:
        first = self._part()
        return (first, self._part()) if self._skip(".") else (self._folded(self._schema), first)

    def _part(self) -> str:
        token = self._next()
        if token.token_type in (
            TokenType.STRING,
            TokenType.L_PAREN,
            TokenType.COMMA,
            TokenType.DOT,
            TokenType.SEMICOLON,
        ):
            raise NotUnderstoodError
        return self._folded(token.text)

    def _folded(self, name: str) -> str:
        return name.lower() if self._fold_case else name

    def _wait(self) -> None:
        """MariaDB's `WAIT n` and `NOWAIT`."""
        if self._skip("WAIT"):
            self._next()
        else:
            self._skip("NOWAIT")

    def _harmless(self, *objects: str) -> None:
        """See that what follows has no rows of ours."""
        if self._peek() not in objects and self._peek() not in _HARMLESS_OBJECTS:
            raise NotUnderstoodError

    def _skip(self, *texts: str) -> bool:
        part = self._tokens[self._at : self._at + len(texts)]
        if len(part) < len(texts) or not all(_is(token, text) for token, text in zip(part, texts, strict=True)):
            return False
        self._at += len(texts)
        return True

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise NotUnderstoodError

    def _peek(self) -> str:
        return self._tokens[self._at].text.upper() if self._at < len(self._tokens) else ""

    def _next(self) -> Token:
        if self._at >= len(self._tokens):
            raise NotUnderstoodError
        self._at += 1
        return self._tokens[self._at - 1]


def _is(token: Token, *texts: str) -> bool:
    quoted = token.token_type in (TokenType.STRING, TokenType.IDENTIFIER)
    return not quoted and token.text.upper() in texts


def _is_unique(spec: list[Token]) -> bool:
    """Whether it adds a key, which takes rows away that have the same one where errors are ignored."""
    return _is(spec[0], "ADD") and any(_is(token, "UNIQUE", "PRIMARY") for token in spec) if spec else False


def _moves_rows(spec: list[Token]) -> bool:
    if len(spec) < 2:
        return False
    if _is(spec[1], "TABLESPACE"):
        return _is(spec[0], "DISCARD", "IMPORT")
    return _is(spec[0], *_MOVES_ROWS) and _is(spec[1], "PARTITION", "TABLE")
