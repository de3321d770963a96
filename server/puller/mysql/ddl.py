"""Reads the statements of a log: transactions that begin and end, DDL by its tables, rows as statements. Pure.

Statements are read as far as the names of tables go: columns come from the server's catalogue or from the log's own
metadata, never from a statement's text. What is not understood is `UNKNOWN`, with all names in it: whoever captures one
of them must stop.
"""

import re
from typing import Final

from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token

from server.puller.mysql.grammar import ROW_VERBS, NotUnderstoodError, StatementReader, Words
from server.puller.mysql.statement import Kind, Statement

_FIXED: Final = {
    "BEGIN": Kind.BEGIN,
    "COMMIT": Kind.COMMIT,
    "ROLLBACK": Kind.ROLLBACK,
}
_EXECUTABLE = re.compile(
    r"('(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|`(?:[^`]|``)*`)|/\*M?!\d*((?:[^*]|\*(?!/))*)\*/"
)
_FIRST_WORD = re.compile(r"\s*(\w+)\b")
_XA = re.compile(r"\s*XA\s+(START|BEGIN|END|PREPARE|COMMIT|ROLLBACK)\s+(.*?)\s*(ONE\s+PHASE)?\s*;?\s*$", re.I | re.S)


def read_statement(query: str, schema: str, *, fold_case: bool = False) -> Statement:
    """Read a statement that ran with `schema` as its default; `fold_case`: names are in lower case on that server."""
    head = query[:16].strip().upper().rstrip(";")
    if head in _FIXED:
        return Statement(_FIXED[head])
    if head.startswith("XA") and (found := _XA.match(query)):
        return _xa_statement(*found.groups())
    if (first := _FIRST_WORD.match(query)) and first.group(1).upper() in ROW_VERBS:
        return Statement(Kind.ROWS, words=_words(query))  # may be megabytes of values: no tokens of them
    try:
        tokens = tokens_of(query)
    except SqlglotError:
        return Statement(Kind.UNKNOWN, words=_words(query))
    reader = StatementReader(tokens, schema, fold_case=fold_case)
    try:
        statement = reader.statement()
    except NotUnderstoodError:
        statement = Statement(Kind.UNKNOWN)
    return Statement(statement.kind, statement.actions, reader.words()) if _needs_words(statement) else statement


def tokens_of(query: str) -> list[Token]:
    """The tokens, those of executable comments among them.

    Raises:
        SqlglotError: a string or a comment has no end.
    """
    return Words().tokenize(_EXECUTABLE.sub(lambda found: found.group(1) or f" {found.group(2)} ", query))


def _words(query: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w$]+", query.lower()))


def _needs_words(statement: Statement) -> bool:
    return statement.kind in (Kind.UNKNOWN, Kind.ROWS)


def _xa_statement(verb: str, xid: str, one_phase: str | None) -> Statement:
    kinds = {"START": Kind.XA_START, "BEGIN": Kind.XA_START, "END": Kind.XA_END, "PREPARE": Kind.NOTHING}
    kinds |= {"COMMIT": Kind.COMMIT if one_phase else Kind.XA_COMMIT, "ROLLBACK": Kind.XA_ROLLBACK}
    return Statement(kinds[verb.upper()], xid=_xid(xid))


def _xid(text: str) -> str:
    """Global and branch id in hexadecimal, whether the log has them as `X'31',X'32',1` or as `'1','2'`."""
    found = re.findall(r"[xX]'([0-9a-fA-F]*)'|'((?:[^']|'')*)'", text)
    parts = [hexed.lower() or plain.replace("''", "'").encode().hex() for hexed, plain in found[:2]]
    return ",".join([*parts, "", ""][:2])
