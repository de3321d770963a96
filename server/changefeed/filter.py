r"""The table filter of a changefeed, in TiDB's table-filter rules; and the syntax `TABLE=…` of the
rules about columns, masks and names in the target, where TABLE is such a rule. Pure.

A rule is `schema.table`, with `!` before it to leave tables out; the last rule that
matches decides. In names `*` is any text, `?` one character, `[a-z]` and `[!a-z]` one of a set, `\`
takes the next character as it is; a name in `"…"` or `` `…` `` has no such characters, and `/…/` is
a regular expression of RE2's. Case does not matter. Source: pingcap/tidb pkg/util/table-filter
(README), whose `@file` is left out: a rule is kept in the metadata, the file would be another one
on each capture.

Matching takes time that grows with the product of the lengths of pattern and name at most, whoever
wrote the pattern. Python's own regular expressions backtrack: `/(a+)+$/` or `*a*a*a*a*` would hold
a capture for hours on one long name. So `/…/` is matched by RE2, which Arrow brings along and whose
dialect TiDB's filters have; and each part of a name with `*` is looked for once, from the left.
"""

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from server.changefeed.source import KINDS, scheme_of
from storage.model.errors import InvalidError

ANY_TEXT = "*"
RULES_MAX: Final = 1024
RULE_CHARACTERS_MAX: Final = 1024
_PLAIN: Final = re.compile(r"[\w$\-]|[^\x00-\x7f]")
_SET_PART: Final = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_QUOTES: Final = '"`'
# `=` ends the table's name, but may stand inside of a quoted name or a regular expression.
_PARTS: Final = re.compile(
    r"""((?:"(?:[^"]|"")*"|`(?:[^`]|``)*`|/(?:[^/\\]|\\.)+/|[^="`/])+)=(.*)""", re.DOTALL
)


class FilterRuleError(InvalidError):
    """A rule of a table filter cannot be used."""

    code = "ErrFilterRuleInvalid"


class NamePattern(Protocol):
    """One of the two names in a rule; case does not matter."""

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the name of a schema or table."""
        ...


@dataclass(frozen=True, slots=True)
class Wildcards:
    """A pattern with `*`, `?` and sets, which must match a name as a whole."""

    _compiled: re.Pattern[str]

    @classmethod
    def of(cls, parts: Sequence[str]) -> "Wildcards":
        """`ANY_TEXT`, or regular expressions of one character each, in order; raises re.error."""
        pieces = [""]
        for part in parts:
            if part == ANY_TEXT:
                pieces.append("")
            else:
                pieces[-1] += part
        first, *others = pieces
        # `(?>…)` keeps the leftmost match of each piece. No later one could help, as anything may
        # stand between the pieces; trying them all would take polynomial time of a high degree.
        middle = "".join(f"(?>.*?{piece})" for piece in others[:-1] if piece)
        last = f".*{others[-1]}" if others else ""
        return cls(re.compile(first + middle + last, re.IGNORECASE | re.DOTALL))

    def matches(self, name: str) -> bool:
        """See `NamePattern.matches`."""
        return self._compiled.fullmatch(name) is not None


def _wildcards(parts: Sequence[str]) -> Wildcards:
    with warnings.catch_warnings():
        # re warns of sets such as [[a] or [a--b], which a later Python may read as set operations.
        # Here they are TiDB's plain sets; their characters are escaped.
        warnings.simplefilter("ignore", FutureWarning)
        return Wildcards.of(parts)


_EVERY_NAME: Final = Wildcards.of((ANY_TEXT,))


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression of RE2's, which may match any part of a name."""

    _text: str

    @classmethod
    def of(cls, text: str) -> "Regex":
        """Raises ValueError: RE2 cannot read it, which has no look-around and no references to
        groups.
        """
        pattern = cls("(?s)" + text)
        # Arrow has no call that only compiles: matching an empty name raises what is wrong with it.
        pattern.matches("")
        return pattern

    def matches(self, name: str) -> bool:
        """See `NamePattern.matches`."""
        return bool(pc.match_substring_regex(pa.scalar(name), self._text, ignore_case=True).as_py())


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    schema: NamePattern
    table: NamePattern
    takes: bool

    def matches(self, schema_name: str, table_name: str) -> bool:
        return self.schema.matches(schema_name) and self.table.matches(table_name)


class TableFilter:
    """The rules of one changefeed."""

    def __init__(self, rules: Sequence[str], never: Collection[str] = ()) -> None:
        """Read the rules; schemas of `never`, in lower case, are not taken whatever the rules say.

        Raises:
            FilterRuleError: one cannot be read, or there are too many.
        """
        if len(rules) > RULES_MAX:
            raise FilterRuleError(f"a table filter has at most {RULES_MAX} rules, not {len(rules)}")
        self._never = frozenset(never)
        # The last rule that matches decides, so `takes` looks at the last one first.
        self._rules = [_rule(text) for text in reversed(rules)]

    def takes(self, schema_name: str, table_name: str) -> bool:
        """Whether the table is to be replicated."""
        if schema_name.lower() in self._never:
            return False
        rule = self._deciding(schema_name, table_name)
        return rule is not None and rule.takes

    def may_take_of(self, schema_name: str) -> bool:
        """Whether a table of this schema may be taken, whatever its name."""
        if schema_name.lower() in self._never:
            return False
        for rule in self._rules:
            if rule.schema.matches(schema_name) and (rule.takes or rule.table == _EVERY_NAME):
                return rule.takes
        return False

    def deciding_rule(self, schema_name: str, table_name: str) -> str:
        """The text of the rule that decides about a table; empty: none matches it."""
        rule = self._deciding(schema_name, table_name)
        return "" if rule is None else rule.text

    def _deciding(self, schema_name: str, table_name: str) -> _Rule | None:
        matching = (rule for rule in self._rules if rule.matches(schema_name, table_name))
        return next(matching, None)


class AllFilters:
    """Takes what each of some filters takes."""

    def __init__(self, filters: Sequence[TableFilter]) -> None:
        self._filters = filters

    def takes(self, schema_name: str, table_name: str) -> bool:
        """See `TableFilter.takes`."""
        return all(each.takes(schema_name, table_name) for each in self._filters)

    def may_take_of(self, schema_name: str) -> bool:
        """See `TableFilter.may_take_of`."""
        return all(each.may_take_of(schema_name) for each in self._filters)


Filter: TypeAlias = TableFilter | AllFilters


def filter_of(source_uri: str, rules: Sequence[str]) -> TableFilter:
    """The filter of a changefeed from that source, which never takes the source's system schemas.

    Raises:
        FilterRuleError: as `TableFilter`.
    """
    kind = KINDS.get(scheme_of(source_uri))
    return TableFilter(rules, kind.system_schemas if kind else ())


def exact_rule(schema_name: str, table_name: str) -> str:
    """The rule that takes just this table."""
    return f"{_quoted(schema_name)}.{_quoted(table_name)}"


def exact_rules(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The rules that take just these tables."""
    return tuple(exact_rule(*name) for name in names)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _rule(text: str) -> _Rule:
    if len(text) > RULE_CHARACTERS_MAX:
        raise FilterRuleError(
            f"a filter rule has at most {RULE_CHARACTERS_MAX} characters, not {len(text)}"
        )
    parser = _Parser(text.strip())
    try:
        return parser.rule()
    except (re.error, ValueError) as err:
        raise FilterRuleError(
            f"the regular expression in the filter rule {text!r} cannot be read: {err}"
        ) from err


class _Parser:
    """Reads one rule from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rule(self) -> _Rule:
        takes = not self._skip("!")
        schema = self._pattern()
        if not self._skip("."):
            raise self._error(
                "it needs a dot between schema and table, as in shop.orders or shop.*"
            )
        table = self._pattern()
        if self._at < len(self._text):
            raise self._error(f"{self._text[self._at :]!r} follows the table")
        return _Rule(self._text, schema, table, takes)

    def _pattern(self) -> NamePattern:
        first = self._text[self._at : self._at + 1]
        if first == "/":
            return Regex.of(self._regex())
        if first and first in _QUOTES:
            return _wildcards([re.escape(self._quoted(first))])
        parts: list[str] = []
        while part := self._wildcard():
            parts.append(part)
        if not parts:
            raise self._error("a name is missing, or has a character that must be quoted")
        return _wildcards(parts)

    def _wildcard(self) -> str:
        character = self._text[self._at : self._at + 1]
        if character == "\\" and self._at + 1 < len(self._text):
            self._at += 2
            return re.escape(self._text[self._at - 1])
        if character == "[":
            return self._set()
        if character in ("*", "?"):
            self._at += 1
            return ANY_TEXT if character == "*" else "."
        if character and _PLAIN.fullmatch(character):
            self._at += 1
            return re.escape(character)
        return ""

    def _set(self) -> str:
        end = self._text.find("]", self._at + 2)
        if end < 0:
            raise self._error("a [ is not closed")
        inside, self._at = self._text[self._at + 1 : end], end + 1
        negated = "^" if inside.startswith("!") else ""
        parts = _SET_PART.findall(inside.removeprefix("!"))
        if not parts:
            raise self._error("a [] is empty")
        return f"[{negated}{''.join(map(_set_part, parts))}]"

    def _quoted(self, quote: str) -> str:
        name = ""
        self._at += 1
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character != quote:
                name += character
            elif not self._skip(quote):
                return name
            else:
                name += quote
        raise self._error(f"a {quote} is not closed")

    def _regex(self) -> str:
        match = re.compile(r"/((?:[^/\\]|\\.)+)/").match(self._text, self._at)
        if match is None:
            raise self._error("a / is not closed")
        self._at = match.end()
        return match[1]

    def _skip(self, character: str) -> bool:
        is_next = self._text.startswith(character, self._at)
        self._at += is_next
        return is_next

    def _error(self, why: str) -> FilterRuleError:
        return FilterRuleError(f"the filter rule {self._text!r} cannot be read: {why}")


def _set_part(part: tuple[str, str, str]) -> str:
    first, last, single = map(re.escape, part)
    return single or f"{first}-{last}"


def table_and_rest(text: str) -> tuple[str, str] | None:
    """Split a rule `TABLE=…`; None: it does not have that form, or begins with `!`."""
    match = _PARTS.fullmatch(text)
    if match is None or match[1].strip().startswith("!"):
        return None
    return match[1], match[2]


def column_pattern(name: str) -> re.Pattern[str]:
    """Matches the columns of a name with `*` and `?`, in any case."""
    # fnmatch reads [sets], which these rules do not have: a bracket stands for itself.
    return re.compile(translate(name.replace("[", "[[]")), re.IGNORECASE)
