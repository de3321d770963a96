"""Cuts statements of MySQL and MariaDB into tokens, as the server's lexer does in the session that
ran them, and reads the tokens from left to right. Pure.

Comments are left out; what stands in executable comments (`/*!50700 … */`, `/*M!100301 … */`) is a
part of the statement where the server's version runs it. Strings lose their quotes and escapes. A
reader's step takes what is expected, or raises NotUnderstoodError.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from server.puller.mysql.ddl.tree import TableName

ANSI_QUOTES: Final = 1 << 2
ORACLE: Final = 1 << 9
MAXDB: Final = 1 << 12
NO_BACKSLASH_ESCAPES: Final = 1 << 20
_STRICT: Final = 1 << 21 | 1 << 22
REAL_AS_FLOAT: Final = 1
_PAD_CHAR: Final = 1 << 31
_ROUND_FRACTIONAL: Final = 1 << 34
EMPTY_STRING_IS_NULL: Final = 1 << 32

_SPACE: Final = re.compile(r"[\s\0]+")
_LINE_COMMENT: Final = re.compile(r"(?:#|--(?=[\s\0]|$))[^\n]*")
_EXECUTABLE: Final = re.compile(r"/\*(M?)!(\d{5,6})?")
_NAME: Final = re.compile(r"`((?:[^`]|``)*)`")
_ANSI_NAME: Final = re.compile(r'"((?:[^"]|"")*)"')
_WORD: Final = re.compile(r"[0-9A-Za-z_$\u0080-\U0010ffff]+")
_NUMBER: Final = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_HEX: Final = re.compile(r"0x([0-9A-Fa-f]+)|[xX]'((?:[0-9A-Fa-f]{2})*)'")
_BITS: Final = re.compile(r"0b([01]+)|[bB]'([01]*)'")
_ESCAPED: Final = {
    "0": "\0",
    "b": "\b",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "Z": "\x1a",
    "%": "\\%",
    "_": "\\_",
}
_STRINGS: Final = {
    (quote, escapes): re.compile(
        f"{quote}((?:[^{quote}{escapes}]|{quote}{quote}{escaped})*){quote}", re.S
    )
    for quote in ("'", '"')
    for escapes, escaped in (("", ""), (r"\\", r"|\\."))
}


class NotUnderstoodError(Exception):
    """The statement goes another way than is known."""


class Sort(enum.Enum):
    """The kind of a token."""

    WORD = "word"
    """A keyword, or a name without quotes."""
    NAME = "name"
    """A quoted name."""
    STRING = "string"
    NUMBER = "number"
    HEX = "hex"
    """A hexadecimal literal; the text is its digits."""
    BITS = "bits"
    SYMBOL = "symbol"


class Token(NamedTuple):
    """A token and its place in the statement."""

    sort: Sort
    text: str
    begin: int
    end: int
    is_quoted: bool = False
    """Of a hexadecimal literal: X'31', not 0x31."""

    def is_word(self, *words: str) -> bool:
        """Whether it is one of these keywords, which are in upper case."""
        return self.sort is Sort.WORD and self.text.upper() in words


@dataclass(frozen=True, slots=True)
class Dialect:
    """The server that ran a statement, and the sql_mode of the session."""

    mariadb: bool = True
    version: int = 0
    """As in executable comments: 101119 is 10.11.19; 0: not known, all of them are taken to run."""
    sql_mode: int = 1 << 21
    fold_case: bool = False
    """The server keeps names of tables in lower case."""
    connection: str = "utf8mb4"
    """The character set of the session's constants."""
    explicit_timestamps: bool = True
    """TIMESTAMP columns are like others: NULL and without a default, unless they say otherwise."""

    @property
    def is_strict(self) -> bool:
        """Whether a value that does not fit makes a statement fail."""
        return bool(self.sql_mode & _STRICT)

    @property
    def real_as_float(self) -> bool:
        """Whether REAL is FLOAT."""
        return bool(self.sql_mode & REAL_AS_FLOAT)

    @property
    def empty_is_null(self) -> bool:
        """Whether the constant '' is NULL. To a MySQL this bit is TIME_TRUNCATE_FRACTIONAL."""
        return self.mariadb and bool(self.sql_mode & EMPTY_STRING_IS_NULL)

    @property
    def type_schema(self) -> str:
        """The schema of MariaDB's whose types are meant where a statement names none. A MySQL 5.7
        has these bits, too, of which MAXDB alone changes a type there.
        """
        if self.mariadb and self.sql_mode & ORACLE:
            return "ORACLE_SCHEMA"
        return "MAXDB_SCHEMA" if self.sql_mode & MAXDB else ""

    @property
    def keeps_references(self) -> bool:
        """Whether REFERENCES in a column's definition is a foreign key: older servers read it and
        forget it.
        """
        return not self.version or self.version >= (100500 if self.mariadb else 90000)

    @property
    def pads_char(self) -> bool:
        """Whether values of CHAR are read with blanks up to their length."""
        return bool(self.sql_mode & _PAD_CHAR)

    @property
    def rounds_fractions(self) -> bool:
        """Whether a MariaDB rounds fractions of seconds that are too long."""
        return bool(self.sql_mode & _ROUND_FRACTIONAL)

    def runs(self, comment: re.Match[str]) -> bool:
        """Whether the server runs what stands in an executable comment."""
        only_mariadb, number = bool(comment[1]), int(comment[2] or 0)
        if only_mariadb and not self.mariadb:
            return False
        if self.mariadb and not only_mariadb and 50700 <= number <= 99999:
            return False
        return not self.version or number <= self.version


def version_number(server_version: str) -> int:
    """`10.11.19-MariaDB-log` as 101119."""
    match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", server_version)
    return int(match[1]) * 10000 + int(match[2]) * 100 + int(match[3]) if match else 0


def tokens_of(query: str, dialect: Dialect) -> list[Token]:
    """The tokens of a statement.

    Raises:
        NotUnderstoodError: a string, a name or a comment has no end.
    """
    return list(_Lexer(query, dialect).run())


class _Lexer:
    def __init__(self, query: str, dialect: Dialect) -> None:
        self._query = query
        self._dialect = dialect
        self._at = 0
        self._in_comment = 0
        """How many executable comments are open."""
        self._found: list[Token] = []

    def run(self) -> list[Token]:
        while self._skip_blanks():
            self._found.append(self._token())
            self._at = self._found[-1].end
        if self._in_comment:
            raise NotUnderstoodError("a comment has no end")
        return self._found

    def _skip_blanks(self) -> bool:
        """Go to the next token; False: there is none."""
        query = self._query
        while self._at < len(query):
            blank = _SPACE.match(query, self._at) or _LINE_COMMENT.match(query, self._at)
            if blank:
                self._at = blank.end()
            elif self._in_comment and query.startswith("*/", self._at):
                self._in_comment, self._at = self._in_comment - 1, self._at + 2
            elif query.startswith("/*", self._at):
                self._comment()
            else:
                return True
        return False

    def _comment(self) -> None:
        executable = _EXECUTABLE.match(self._query, self._at)
        if executable and self._dialect.runs(executable):
            self._in_comment, self._at = self._in_comment + 1, executable.end()
            return
        end = self._query.find("*/", self._at + 2)
        if executable:  # one that does not run may hold plain comments
            inner = self._query.find("/*", self._at + 2)
            while 0 <= inner < end:
                inner, end = self._query.find("/*", inner + 2), self._query.find("*/", end + 2)
        if end < 0:
            raise NotUnderstoodError("a comment has no end")
        self._at = end + 2

    def _token(self) -> Token:
        query, at = self._query, self._at
        char = query[at]
        if char == "`" or (char == '"' and self._dialect.sql_mode & ANSI_QUOTES):
            return self._quoted(_NAME if char == "`" else _ANSI_NAME, char)
        if char in "'\"":
            return self._string(at)
        if char in "nN" and query[at + 1 : at + 2] == "'":
            return self._string(at + 1)
        after_dot = (
            bool(self._found)
            and self._found[-1].text == "."
            and self._found[-1].sort is Sort.SYMBOL
        )
        if not after_dot:
            for sort, pattern in ((Sort.HEX, _HEX), (Sort.BITS, _BITS)):
                if (match := pattern.match(query, at)) and not _goes_on(query, match):
                    is_quoted = match[2] is not None
                    return Token(sort, match[1] or match[2] or "", at, match.end(), is_quoted)
            number = _NUMBER.match(query, at)
            if number and not _goes_on(query, number) and not self._names_part(char):
                return Token(Sort.NUMBER, number[0], at, number.end())
        if word := _WORD.match(query, at):
            return Token(Sort.WORD, word[0], at, word.end())
        return Token(Sort.SYMBOL, char, at, at + 1)

    def _names_part(self, char: str) -> bool:
        """Whether a dot goes between two parts of a name: with a blank before it, `.5` is a
        number.
        """
        if char != "." or not self._found:
            return False
        before = self._found[-1]
        return before.end == self._at and before.sort in (Sort.WORD, Sort.NAME)

    def _quoted(self, pattern: re.Pattern[str], quote: str) -> Token:
        match = pattern.match(self._query, self._at)
        if match is None:
            raise NotUnderstoodError("a quoted name has no end")
        return Token(Sort.NAME, match[1].replace(2 * quote, quote), self._at, match.end())

    def _string(self, at: int) -> Token:
        quote, plain = self._query[at], bool(self._dialect.sql_mode & NO_BACKSLASH_ESCAPES)
        match = _STRINGS[quote, "" if plain else r"\\"].match(self._query, at)
        if match is None:
            raise NotUnderstoodError("a string has no end")
        return Token(Sort.STRING, _unescaped(match[1], quote, plain=plain), self._at, match.end())


def _goes_on(query: str, match: re.Match[str]) -> bool:
    """Whether a number is only the beginning of a name, as `1a` is."""
    return bool(_WORD.match(query, match.end())) if match[0][-1:].isalnum() else False


def _unescaped(text: str, quote: str, *, plain: bool) -> str:
    if plain:
        return text.replace(2 * quote, quote)
    pattern = re.compile(rf"\\(.)|{quote}{quote}", re.S)
    return pattern.sub(lambda each: _ESCAPED.get(each[1], each[1]) if each[1] else quote, text)


T = TypeVar("T")
_RESERVED_NAMES: Final = frozenset(
    re.findall(
        r"\w+",
        """
        ADD ALTER AND AS BY CHECK COLUMN CONSTRAINT CREATE DEFAULT DELETE DROP EXISTS FOR FOREIGN FROM GRANT
        IF IN INDEX INSERT INTO IS KEY LIKE NOT NULL ON OR PRIMARY REFERENCES RENAME SELECT SET SPATIAL
        FULLTEXT TABLE TO UNIQUE UPDATE USING VALUES WHERE WITH CHANGE
        """,
    )
)


class TokenReader:
    """Reads tokens one after the other; the base of all grammars."""

    def __init__(self, tokens: Sequence[Token], schema: str, dialect: Dialect) -> None:
        self.tokens = tokens
        self.schema = schema
        self.dialect = dialect
        self.at = 0

    @property
    def ended(self) -> bool:
        """Whether all tokens were read."""
        return self.at >= len(self.tokens)

    def peek(self, ahead: int = 0) -> Token | None:
        """A token that comes."""
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def next(self) -> Token:
        """Take a token."""
        token = self.peek()
        if token is None:
            raise NotUnderstoodError("the statement ends early")
        self.at += 1
        return token

    def sees(self, *texts: str) -> bool:
        """Whether these keywords or symbols come next."""
        return all(_is(self.peek(ahead), text) for ahead, text in enumerate(texts))

    def skip(self, *texts: str) -> bool:
        """Take these, if they come next."""
        if not self.sees(*texts):
            return False
        self.at += len(texts)
        return True

    def skip_any(self, *texts: str) -> str:
        """Take one of these, if it comes next; which one, or nothing."""
        for text in texts:
            if self.skip(text):
                return text
        return ""

    def expect(self, *texts: str) -> None:
        """Take these."""
        if not self.skip(*texts):
            raise NotUnderstoodError(f"{' '.join(texts)} is missing at token {self.at}")

    def name(self) -> str:
        """A name, quoted or not."""
        token = self.next()
        if token.sort is Sort.NAME:
            return token.text
        if token.sort is not Sort.WORD:
            raise NotUnderstoodError(f"{token.text!r} is no name")
        return token.text

    def new_name(self) -> str:
        """A name where a keyword could stand as well: a reserved word is none."""
        token = self.peek()
        if token is not None and token.sort is Sort.WORD and token.text.upper() in _RESERVED_NAMES:
            raise NotUnderstoodError(f"{token.text!r} is no name here")
        return self.name()

    def table_name(self) -> TableName:
        """`schema.table`, or a table of the default schema."""
        self.skip(".")
        first = self.as_kept(self.name())
        return (
            (first, self.as_kept(self.name()))
            if self.skip(".")
            else (self.as_kept(self.schema), first)
        )

    def column_name(self) -> str:
        """A column, perhaps with its table's name before it."""
        name = self.new_name()
        while self.skip("."):
            name = self.name()
        return name

    def as_kept(self, name: str) -> str:
        """A table's or schema's name as the server keeps it."""
        return name.lower() if self.dialect.fold_case else name

    def string(self) -> str:
        """A string, and those that follow it."""
        token = self.next()
        if token.sort is not Sort.STRING:
            raise NotUnderstoodError(f"{token.text!r} is no string")
        return token.text + self._adjacent()

    def _adjacent(self) -> str:
        text = ""
        while (token := self.peek()) is not None and token.sort is Sort.STRING:
            text += self.next().text
        return text

    def number(self) -> int:
        """A whole number."""
        token = self.next()
        if token.sort is not Sort.NUMBER or not token.text.isdecimal():
            raise NotUnderstoodError(f"{token.text!r} is no number")
        return int(token.text)

    def parentheses(self) -> str:
        """All in parentheses, blanks between its words."""
        return shown(self.in_parentheses())

    def in_parentheses(self) -> Sequence[Token]:
        """The tokens in parentheses."""
        self.expect("(")
        begin, depth = self.at, 1
        while depth:
            token = self.next()
            if token.sort is Sort.SYMBOL:
                depth += (token.text == "(") - (token.text == ")")
        return self.tokens[begin : self.at - 1]

    def listed(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Read one or several items with commas between them."""
        items = [read()]
        while self.skip(","):
            items.append(read())
        return tuple(items)

    def if_exists(self) -> bool:
        """IF EXISTS."""
        return self.skip("IF", "EXISTS")

    def if_not_exists(self) -> bool:
        """IF NOT EXISTS."""
        return self.skip("IF", "NOT", "EXISTS")

    def wait(self) -> None:
        """MariaDB's `WAIT n` and `NOWAIT`."""
        if self.sees("WAIT") and (token := self.peek(1)) is not None and token.sort is Sort.NUMBER:
            self.at += 2
        elif not self.sees("NOWAIT", "."):
            self.skip("NOWAIT")

    def charset(self) -> str:
        """The name of a character set or collation, in lower case."""
        token = self.next()
        if token.sort in (Sort.WORD, Sort.NAME, Sort.STRING):
            return token.text.lower()
        raise NotUnderstoodError(f"{token.text!r} is no character set")


def shown(tokens: Sequence[Token]) -> str:
    """Tokens as text that is the same however they were spelt."""
    quotes = {Sort.NAME: "`", Sort.STRING: "'"}
    return " ".join(
        f"{quotes.get(token.sort, '')}{token.text}{quotes.get(token.sort, '')}"
        if token.sort is not Sort.WORD
        else token.text.lower()
        for token in tokens
    )


def _is(token: Token | None, text: str) -> bool:
    if token is None:
        return False
    return (
        token.text.upper() == text
        if token.sort is Sort.WORD
        else token.sort is Sort.SYMBOL and token.text == text
    )
