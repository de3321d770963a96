"""Changes that readers do not get: TiCDC's event filters. Pure.

A filter ignores the changes of a table by what they are (`OPERATIONS`), or where a condition holds
of a row's values: of the new ones of an insert or update, of the old ones of an update or delete;
and updates that change some columns only.
A row of a dump, which comes as an update of nothing, counts as an insert. Rows are numbered before
they are filtered (`sink.mounts.SequenceMount`): which rows a reader gets, and their `_seq`, does
not depend on where batches end.

A `Condition` is SQL's, over Arrow columns:

    condition  = term { ( OR | '||' ) term }
    term       = factor { ( AND | '&&' ) factor }
    factor     = ( NOT | '!' ) factor | '(' condition ')' | TRUE | FALSE | test
    test       = column ( comparison ( column | literal )
                        | IS [ NOT ] NULL
                        | [ NOT ] IN '(' literal { ',' literal } ')'
                        | [ NOT ] BETWEEN literal AND literal
                        | [ NOT ] LIKE text )
    comparison = '=' | '!=' | '<>' | '<' | '<=' | '>' | '>='
    literal    = number | text | TRUE | FALSE | NULL

As in SQL a condition that is neither true nor false, as one about a NULL, does not hold. Texts are
compared by their bytes, whatever the column's collation; a date or time is compared with a text. A
TIMESTAMP is shown in UTC, so a text without a zone is UTC, too.
Columns are those that readers get, by their names at the source, in any case: a source need not
bring the values of others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sink.mounter import META_FIELDS, TableMounter, as_deletes, source_columns, whole_mounter
from storage.model.errors import InvalidError
from storage.model.event import DELETE, INSERT, UPDATE

OPERATIONS: Final[Mapping[str, int]] = {"insert": INSERT, "update": UPDATE, "delete": DELETE}
CONDITIONS: Final[Mapping[str, tuple[int, bool]]] = {
    "insert": (INSERT, True),
    "update_new": (UPDATE, True),
    "update_old": (UPDATE, False),
    "delete": (DELETE, False),
}
"""What each condition is asked of: an operation, and whether of its new values."""
CHARACTERS_MAX: Final = 4096
_DEPTH_MAX: Final = 100
_INTEGER_DIGITS: Final = 20
_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w$]))
    | (?P<text>'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|""|\\.)*")
    | `(?P<quoted>(?:[^`]|``)+)`
    | (?P<word>(?:[^\W\d]|\$)[\w$]*)
    | (?P<sign><=|>=|<>|!=|\|\||&&|[=<>!(),])
    | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "Z": "\x1a"}
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_KEYWORDS: Final = frozenset({"AND", "OR", "NOT", "IS", "IN", "BETWEEN", "LIKE", "NULL"})
_BOOLEANS: Final = {"TRUE": True, "FALSE": False}
"""As in MySQL they are 1 and 0 where a column is compared with them."""
Literal: TypeAlias = Decimal | str | None
_Test: TypeAlias = Callable[[pa.RecordBatch], Any]
"""Gives TRUE, FALSE or NULL for each row: an array, or a scalar for all of them."""


class ConditionError(InvalidError):
    """A condition cannot be used; the message says where and why."""

    code = "ErrExpressionParseFailed"


@dataclass(frozen=True)
class Condition:
    """A condition, for the rows of any table."""

    text: str
    columns: frozenset[str] = field(init=False, repr=False, compare=False)
    """The names of the columns that it is about, in lower case."""
    _test: _Test = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read it.

        Raises:
            ConditionError: it is none.
        """
        parser = _Parser(self.text)
        object.__setattr__(self, "_test", parser.whole())
        object.__setattr__(self, "columns", frozenset(parser.columns))

    def check(self, schema: pa.Schema) -> None:
        """See that it can be asked of rows of that schema.

        Raises:
            ConditionError: a column is not there, or cannot be compared so.
        """
        columns = [pa.array([], field.type) for field in schema]
        self.mask(pa.RecordBatch.from_arrays(columns, schema=schema))

    def mask(self, rows: pa.RecordBatch) -> pa.Array:
        """The rows for which it holds, as a mask; raises as `check`."""
        try:
            answer = self._test(rows)
            if isinstance(answer, pa.Scalar):
                answer = pa.repeat(answer, rows.num_rows)
            return pc.fill_null(answer, fill_value=False)
        except pa.ArrowException as err:
            raise ConditionError(f"{self.text!r} cannot be asked of these rows: {err}") from None


@dataclass(frozen=True)
class RowFilter:
    """The changes of one table that are ignored."""

    operations: frozenset[str] = frozenset()
    """Some of `OPERATIONS`."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By some of `CONDITIONS`."""
    only_columns: tuple[frozenset[str], ...] = ()
    """Sets of names in lower case: an update is ignored that changes columns of one set only."""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "RowFilter":
        """Read what `to_document` made; raises ConditionError."""
        conditions = {name: Condition(text) for name, text in document["conditions"].items()}
        only_columns = tuple(map(frozenset, document.get("only_columns", ())))
        return cls(frozenset(document["operations"]), conditions, only_columns)

    def to_document(self) -> dict[str, Any]:
        """The filter as a table's record holds it."""
        conditions = {name: each.text for name, each in self.conditions.items()}
        document = {"operations": sorted(self.operations), "conditions": conditions}
        # Left out where there is none: earlier versions do not know it.
        only_columns = list(map(sorted, self.only_columns))
        return document | ({"only_columns": only_columns} if only_columns else {})

    def check(self, mounter: TableMounter) -> None:
        """See that its conditions can be asked of a table; raises ConditionError."""
        columns = {name.lower() for name in source_columns(mounter)}
        for condition in self.conditions.values():
            condition.check(_own(whole_mounter(mounter).schema))
            if not condition.columns <= columns:
                raise ConditionError(
                    f"{condition.text!r} is about {', '.join(sorted(condition.columns - columns))}, "
                    "which the changefeed does not take: see its rules about columns"
                )
        for names in self.only_columns:
            if not names <= columns:
                raise ConditionError(
                    "ignore-update-only-columns names "
                    f"{', '.join(sorted(names - columns))}, which the changefeed does not take; "
                    f"there are {', '.join(sorted(columns))}"
                )

    def ignored(self, raw: pa.RecordBatch, mounter: TableMounter) -> npt.NDArray[np.bool_]:
        """Which changes of `raw` readers do not get; updates that change a key were split."""
        ops, whole = _ops(raw), whole_mounter(mounter)
        ignored = np.isin(ops, [OPERATIONS[name] for name in self.operations])
        for name, condition in self.conditions.items():
            op, is_new = CONDITIONS[name]
            places = np.flatnonzero((ops == op) & ~ignored)
            if len(places):
                rows = raw.take(pa.array(places))
                mounted = whole.mount(rows if is_new else as_deletes(rows))
                ignored[places] = condition.mask(_values(mounted))
        places = np.flatnonzero((ops == UPDATE) & ~ignored)
        if self.only_columns and len(places):
            rows = raw.take(pa.array(places))
            new, old = _values(whole.mount(rows)), _values(whole.mount(as_deletes(rows)))
            ignored[places] = self._changes_these_only(new, old)
        return ignored

    def _changes_these_only(
        self, new: pa.RecordBatch, old: pa.RecordBatch
    ) -> npt.NDArray[np.bool_]:
        """The updates whose differing columns are all in one of `only_columns`, as a mask."""
        kept = np.ones((len(self.only_columns), new.num_rows), bool)
        for name, after, before in zip(new.schema.names, new.columns, old.columns, strict=True):
            others = [
                place for place, names in enumerate(self.only_columns) if name.lower() not in names
            ]
            if others:
                kept[others] &= _same(after, before)
        return np.asarray(kept.any(axis=0), bool)


class FilteredMounter:
    """Implements `TableMounter` by `inner`; `kept` leaves out rows of what it gives."""

    def __init__(self, inner: TableMounter, row_filter: RowFilter) -> None:
        self.inner = inner
        self.row_filter = row_filter
        self.name: str = inner.name
        self.key_columns: tuple[str, ...] = inner.key_columns
        self.schema: pa.Schema = inner.schema
        self.moves_keys: bool = inner.moves_keys

    def split(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.split`."""
        return self.inner.split(raw)

    def mount(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """See `TableMounter.mount`: all rows, as whoever calls counts what comes out."""
        return self.inner.mount(raw)

    def kept(self, raw: pa.RecordBatch, mounted: pa.RecordBatch) -> pa.RecordBatch:
        """The part of `mounted` that readers get; it was made of `raw` after `split`."""
        ignored = self.row_filter.ignored(raw, self.inner)
        return mounted.filter(pa.array(~ignored)) if ignored.any() else mounted


def _ops(raw: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """The operation of each change, as a filter sees it."""
    ops = np.asarray(raw["op"])
    return np.where((ops == UPDATE) & np.asarray(raw["old_value"].is_null()), INSERT, ops)


def _own(schema: pa.Schema) -> pa.Schema:
    """The table's own columns: one of them may be called like one of ours."""
    return pa.schema(list(schema)[len(META_FIELDS) :])


def _same(one: pa.Array, other: pa.Array) -> npt.NDArray[np.bool_]:
    """Where two columns have the same value, or both have none."""
    try:
        equal = pc.fill_null(pc.equal(one, other), fill_value=False)
    except pa.ArrowNotImplementedError:  # lists, such as vectors
        return np.array([a == b for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)])
    return np.asarray(pc.or_(equal, pc.and_(pc.is_null(one), pc.is_null(other))))


def _values(mounted: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        mounted.columns[len(META_FIELDS) :], schema=_own(mounted.schema)
    )


class _Parser:
    """Reads one condition from left to right, by the grammar above."""

    def __init__(self, text: str) -> None:
        if len(text) > CHARACTERS_MAX:
            raise ConditionError(
                f"a condition has at most {CHARACTERS_MAX} characters, not {len(text)}"
            )
        self.columns: set[str] = set()
        self._text = text
        self._depth = 0
        self._next()

    def whole(self) -> _Test:
        """All of the text."""
        test = self._condition()
        if self._kind != "end":
            raise self._error("an end, AND or OR")
        return test

    def _condition(self) -> _Test:
        # A condition in parentheses calls this once more: Python's stack bounds how deep.
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise ConditionError(f"{self._text[:100]!r}…: parentheses are too deep")
        terms = [self._term()]
        while self._skip("OR", "||"):
            terms.append(self._term())
        self._depth -= 1
        return _joined(pc.or_kleene, terms)

    def _term(self) -> _Test:
        factors = [self._factor()]
        while self._skip("AND", "&&"):
            factors.append(self._factor())
        return _joined(pc.and_kleene, factors)

    def _factor(self) -> _Test:
        negations = 0
        while self._skip("NOT", "!"):
            negations += 1
        test = self._plain_factor()
        return _negated(test) if negations % 2 else test

    def _plain_factor(self) -> _Test:
        if self._skip("("):
            test = self._condition()
            self._expect(")")
            return test
        if self._kind == "word" and self._value.upper() in _BOOLEANS:
            constant = pa.scalar(_BOOLEANS[self._next().upper()])
            return lambda _: constant
        return self._of_column(self._column())

    def _of_column(self, name: str) -> _Test:
        if self._skip("IS"):
            is_negated = self._skip("NOT")
            self._expect("NULL")
            return (
                (lambda rows: pc.is_valid(self._in(rows, name)))
                if is_negated
                else (lambda rows: pc.is_null(self._in(rows, name)))
            )
        if self._kind == "sign" and self._value in _COMPARISONS:
            return self._compared(name, self._next())
        is_negated = self._skip("NOT")
        test = self._listed(name)
        return _negated(test) if is_negated else test

    def _compared(self, name: str, sign: str) -> _Test:
        compare = _COMPARISONS[sign]
        if self._is_column():
            other = self._column()
            return lambda rows: compare(*_same_type(self._in(rows, name), self._in(rows, other)))
        return self._against(name, compare, self._literal())

    def _listed(self, name: str) -> _Test:
        """IN, BETWEEN and LIKE."""
        if self._skip("IN"):
            self._expect("(")
            tests = [self._against(name, pc.equal, self._literal())]
            while self._skip(","):
                tests.append(self._against(name, pc.equal, self._literal()))
            self._expect(")")
            return _joined(pc.or_kleene, tests)
        if self._skip("BETWEEN"):
            least = self._against(name, pc.greater_equal, self._literal())
            self._expect("AND")
            most = self._against(name, pc.less_equal, self._literal())
            return _joined(pc.and_kleene, [least, most])
        self._expect("LIKE", description="a comparison, IS, IN, BETWEEN or LIKE")
        if self._kind != "text":
            raise self._error("a text")
        pattern = _unquoted(self._next())
        return lambda rows: pc.match_like(self._in(rows, name), pattern)

    def _against(self, name: str, compare: Callable[[Any, Any], Any], literal: Literal) -> _Test:
        def test(rows: pa.RecordBatch) -> Any:
            column = self._in(rows, name)
            if literal is None:
                return pa.scalar(None, pa.bool_())
            return compare(*_comparable(column, literal))

        return test

    def _in(self, rows: pa.RecordBatch, name: str) -> pa.Array:
        """The column of that name; raises ConditionError."""
        for place, own in enumerate(rows.schema.names):
            if own.lower() == name.lower():
                return rows.column(place)
        raise ConditionError(
            f"{self._text!r}: there is no column {name!r}; there are {', '.join(rows.schema.names)}"
        )

    def _is_column(self) -> bool:
        word = self._value.upper()
        return self._kind == "quoted" or (
            self._kind == "word" and word not in _KEYWORDS and word not in _BOOLEANS
        )

    def _column(self) -> str:
        if not self._is_column():
            raise self._error("a column")
        is_quoted = self._kind == "quoted"
        name = self._next()
        name = name.replace("``", "`") if is_quoted else name
        self.columns.add(name.lower())
        return name

    def _literal(self) -> Literal:
        word = self._value.upper()
        if self._kind == "number":
            return Decimal(self._next())
        if self._kind == "text":
            return _unquoted(self._next())
        if self._kind == "word" and word in _BOOLEANS:
            self._next()
            return Decimal(_BOOLEANS[word])
        if self._skip("NULL"):
            return None
        raise self._error("a number, a text, TRUE, FALSE or NULL")

    def _skip(self, *tokens: str) -> bool:
        is_there = self._kind in ("word", "sign") and self._value.upper() in tokens
        if is_there:
            self._next()
        return is_there

    def _expect(self, token: str, description: str = "") -> None:
        if not self._skip(token):
            raise self._error(description or token)

    def _error(self, expected: str) -> ConditionError:
        token = f"{self._value!r}" if self._kind != "end" else "its end"
        return ConditionError(
            f"the condition {self._text!r}, at character {self._begin + 1}: {expected} is expected, "
            f"not {token}"
        )

    _kind, _value, _begin, _end = "", "", 0, 0

    def _next(self) -> str:
        """Go on to the next token; returns the present one."""
        value = self._value
        match = _TOKEN.match(self._text, self._end)
        if match is None or match.lastgroup is None:
            raise ConditionError(
                f"the condition {self._text!r}, at character {self._end + 1}: "
                f"{self._text[self._end : self._end + 20].strip()!r} cannot be read"
            )
        self._kind, self._value = match.lastgroup, match[match.lastgroup]
        self._begin, self._end = match.start(match.lastgroup), match.end()
        return value


def _joined(join: Callable[[Any, Any], Any], tests: "list[_Test]") -> _Test:
    if len(tests) == 1:
        return tests[0]
    return lambda rows: reduce(join, [test(rows) for test in tests])


def _negated(test: _Test) -> _Test:
    return lambda rows: pc.invert(test(rows))


def _comparable(column: pa.Array, literal: Decimal | str) -> tuple[pa.Array, pa.Scalar]:
    """Both as one type; raises ArrowException."""
    is_text = isinstance(literal, str)
    kind = column.type
    if _is_number(kind) == is_text:
        raise pa.ArrowTypeError(
            f"a column of the type {kind} is compared with a {'text' if is_text else 'number'}"
        )
    if isinstance(literal, str):
        return column, _from_text(literal, kind)
    if pa.types.is_floating(kind):
        return column, pa.scalar(float(literal), kind)
    # Exactly: whole numbers may lie beyond the column's type, and have digits behind the point.
    return _as_decimal(column), pa.scalar(literal)


def _from_text(text: str, kind: pa.DataType) -> pa.Scalar:
    """Dates and times from their text, bytes from their characters; raises ArrowException."""
    scalar = pa.scalar(text)
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return scalar.cast(kind)
    try:
        return scalar.cast(kind)
    except pa.ArrowInvalid:
        # Arrow reads an instant only with its zone; MySQL's users write none.
        return scalar.cast(pa.timestamp(kind.unit)).cast(kind)


def _same_type(one: pa.Array, other: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Two columns as one type, where Arrow would not compare them exactly."""
    kinds = (one.type, other.type)
    if one.type == other.type or not all(map(_is_number, kinds)):
        return one, other
    if any(map(pa.types.is_floating, kinds)):
        return one.cast(pa.float64()), other.cast(pa.float64())
    return _as_decimal(one), _as_decimal(other)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def _as_decimal(column: pa.Array) -> pa.Array:
    """Numbers without rounding, which compare with any other exactly."""
    if pa.types.is_integer(column.type):
        column = column.cast(pa.decimal128(_INTEGER_DIGITS, 0))
    # Arrow compares decimals in a type with the digits of both before and behind the point, which
    # are often more than the 38 that 128 bits have.
    return column.cast(pa.decimal256(column.type.precision, column.type.scale))


def _unquoted(text: str) -> str:
    """A text between quotes, as MySQL reads it by default."""
    quote, inner = text[0], text[1:-1]
    return re.sub(
        rf"{quote}{quote}|\\(.)",
        lambda match: quote if match[1] is None else _ESCAPES.get(match[1], _escaped(match[1])),
        inner,
        flags=re.DOTALL,
    )


def _escaped(character: str) -> str:
    """The wildcards of LIKE keep their backslash."""
    return f"\\{character}" if character in "%_" else character
