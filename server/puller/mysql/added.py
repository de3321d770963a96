"""What a statement says of the rows that are older than a column it adds: its DEFAULT, where that is a constant. Pure.

The text is read and not the catalogue, which may be further than the log: a default that was changed since is not what
the rows got. What is not surely understood is untold, and such rows show null.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from server.puller.mysql.ddl import tokens_of

_BY_ROW: Final = frozenset({"AUTO_INCREMENT", "AS", "GENERATED", "SERIAL"})
_OPERATORS: Final = frozenset({"DIV", "MOD", "AND", "OR", "XOR", "LIKE", "IN", "IS", "BETWEEN", "REGEXP", "COLLATE"})
_TRUTHS: Final = {TokenType.TRUE: "1", TokenType.FALSE: "0"}
_WORD: Final = re.compile(r"[A-Za-z_]+")


@dataclass(frozen=True, slots=True)
class Constant:
    """`DEFAULT literal`; None is NULL."""

    text: str | None
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Implicit:
    """No DEFAULT: null, or the type's own one where the column is NOT NULL."""


Said = Constant | Implicit | None
"""None: not a constant, or not understood."""


def added_columns(query: str) -> Mapping[str, Said]:
    """By lower-case name the columns that an ALTER TABLE adds; none of other statements."""
    try:
        tokens = tokens_of(query)
    except SqlglotError:
        return {}
    if len(tokens) < 4 or tokens[0].text.upper() != "ALTER":
        return {}
    plain = "\\" not in query and "\ufffd" not in query  # else strings depend on the session
    found: dict[str, Said] = {}
    for definition in _definitions(tokens):
        said = _said(definition[1:])
        untold = isinstance(said, Constant) and said.quoted and not plain
        found[definition[0].text.lower()] = None if untold else said
    return found


def _definitions(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """The column definitions behind ADD, each with its name first; keys and constraints among them."""
    for place, spec in enumerate(_parts(tokens)):
        adds = [at for at, token in enumerate(spec) if _is(token, "ADD")] if place == 0 else [0]
        if not adds or not spec or not _is(spec[adds[0]], "ADD"):
            continue
        rest = spec[adds[0] + 1 :]
        rest = rest[1:] if rest and _is(rest[0], "COLUMN") else rest
        if [token.text.upper() for token in rest[:3]] == ["IF", "NOT", "EXISTS"]:
            rest = rest[3:]
        several = rest and rest[0].token_type is TokenType.L_PAREN
        yield from (part for part in (_parts(rest[1:-1]) if several else [rest]) if len(part) > 1)


def _parts(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Cut at the commas that are in no parentheses."""
    depth, begin = 0, 0
    for at, token in enumerate(tokens):
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if depth == 0 and token.token_type is TokenType.COMMA:
            yield tokens[begin:at]
            begin = at + 1
    yield tokens[begin:]


def _said(definition: Sequence[Token]) -> Said:
    if any(_is(token, *_BY_ROW) for token in definition):
        return None
    defaults = [at for at, token in enumerate(definition) if _is(token, "DEFAULT")]
    if not defaults:
        return Implicit()
    return _constant(definition[defaults[0] + 1 :]) if len(defaults) == 1 else None


def _constant(tokens: Sequence[Token]) -> Constant | None:
    if tokens and tokens[0].token_type is TokenType.L_PAREN:
        ends = [at for at, token in enumerate(tokens) if token.token_type is TokenType.R_PAREN]
        return _constant(tokens[1 : ends[0]]) if ends else None
    sign = "-" if tokens and tokens[0].token_type is TokenType.DASH else ""
    tokens = tokens[len(sign) :]
    if not tokens or not _ends(tokens[1:]):
        return None
    kind, text = tokens[0].token_type, tokens[0].text
    if kind is TokenType.NUMBER:
        return Constant(sign + text)
    if sign:
        return None
    if kind is TokenType.STRING:
        return Constant(text, quoted=True)
    if kind in _TRUTHS:
        return Constant(_TRUTHS[kind])
    return Constant(None) if kind is TokenType.NULL else None


def _ends(rest: Sequence[Token]) -> bool:
    """Whether a literal is the whole default: what follows is another attribute of the column."""
    if not rest:
        return True
    is_text = rest[0].token_type in (TokenType.STRING, TokenType.IDENTIFIER)
    return not is_text and bool(_WORD.fullmatch(rest[0].text)) and rest[0].text.upper() not in _OPERATORS


def _is(token: Token, *texts: str) -> bool:
    quoted = token.token_type in (TokenType.STRING, TokenType.IDENTIFIER)
    return not quoted and token.text.upper() in texts
