"""Reads tokens from left to right; a step takes what is expected,
or the statement is not understood. Pure.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from server.puller.mysql.tokens import Dialect, NotUnderstoodError, Sort, Token
from server.puller.mysql.tree import TableName

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
    """What is common to all grammars."""

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
        first = self.folded(self.name())
        return (
            (first, self.folded(self.name()))
            if self.skip(".")
            else (self.folded(self.schema), first)
        )

    def column_name(self) -> str:
        """A column, perhaps with its table's name before it."""
        name = self.new_name()
        while self.skip("."):
            name = self.name()
        return name

    def folded(self, name: str) -> str:
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
        """One or several, commas between them."""
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
