"""Which columns readers are shown by a mask (`sink.masking`). Pure.

    rule = table '=' column ':' mask ( ',' column ':' mask )*
    crm.*=email:mask.hash.SHA-256,phone_?:mask.with.4.chars,note:truncate.to.20.chars

`table` is a rule of a table filter without `!`, `column` a name with `*` and `?`; case does not
matter. All rules about a table count, and one column has one mask.

A mask hides a value. So whatever might show it is refused with its name: a column in a rule that no
table has, two masks for one column, a mask that a column cannot have. And a column keeps its mask
when the column or its table is renamed, by the column's identity.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from server.changefeed.filter import TableFilter, column_pattern, table_and_rest
from server.changefeed.identity import by_identity, fields
from server.changefeed.salt import Salt
from server.changefeed.table import SourceTable, TableRecord
from sink.masking import Mask, MaskError
from sink.mounter import default_of, whole_mounter

RULES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    mask: Mask
    matches: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    tables: TableFilter
    columns: tuple[_Column, ...]


@dataclass(frozen=True)
class MaskRules:
    """The rules of one changefeed."""

    texts: Sequence[str] = ()
    salt: Salt | None = None
    """The salt of hashing masks."""
    _rules: list[_Rule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the rules.

        Raises:
            MaskError, FilterRuleError: one cannot be read, or there are too many.
        """
        if len(self.texts) > RULES_MAX:
            raise MaskError(
                f"there are at most {RULES_MAX} rules about masks, not {len(self.texts)}"
            )
        object.__setattr__(self, "_rules", [_rule(text) for text in self.texts])

    @property
    def hashes(self) -> bool:
        """Whether the mask needs a salt."""
        return any(column.mask.is_hash for rule in self._rules for column in rule.columns)

    def of(
        self, record: TableRecord, table: SourceTable, before: SourceTable | None = None
    ) -> TableRecord:
        """The record of `table`, whose columns are shown by masks; `before` is the same table as it
        is in force.

        Raises:
            MaskError: a column has two masks, or one that it cannot have.
            SaltUnavailableError: a column's default is to be hashed, and the salt is not there.
        """
        columns = fields(table)
        masks = {name: mask for name in columns if (mask := self._mask_of(table, name)) is not None}
        if before is not None:
            masks = _kept(before, table) | masks
        for name, mask in masks.items():
            is_key = name in whole_mounter(table.mounter).key_columns
            mask.check(f"{table.name}: the column {name}", columns[name].type, is_key=is_key)
        if before is not None:
            _check_types(table, before, masks)
        # In the order of the table's columns, whichever rule is about them.
        shown = {
            name: self._with_default(masks[name], column)
            for name, column in columns.items()
            if name in masks
        }
        return record.masking(shown, self.salt) if shown or record.masked else record

    def _with_default(self, mask: Mask, column: pa.Field) -> Mask:
        """Mask the default that older rows have for a column, here and once: a table is read again
        where there may be no salt.
        """
        default = default_of(column)
        if default is None:
            return mask
        salted = Mask.parse(mask.text, salt=None if self.salt is None else self.salt.secret)
        return replace(mask, default=salted.shown(default)[0].as_py())

    def check(self, tables: Sequence[SourceTable], new: Collection[str] | None = None) -> None:
        """See that every rule is about a table of the changefeed, and every column of it one of
        such a table, if all of these are `new`, by name; None: they are.

        Raises:
            MaskError: with the rule.
        """
        for rule in self._rules:
            mine = [each for each in tables if _is_about(rule, each)]
            if not mine:
                raise MaskError(f"the mask rule {rule.text!r} is about no table of the changefeed")
            if new is not None and not all(each.name in new for each in mine):
                continue
            names = {name for table in mine for name in fields(table)}
            for column in rule.columns:
                if not any(map(column.matches.fullmatch, names)):
                    raise MaskError(
                        f"the mask rule {rule.text!r}: no table that it is about has a column "
                        f"{column.name!r}; there are {', '.join(sorted(names))}"
                    )

    def _mask_of(self, table: SourceTable, name: str) -> Mask | None:
        masks = {column.mask for column in self._about(table) if column.matches.fullmatch(name)}
        if len(masks) > 1:
            texts = ", ".join(sorted(mask.text for mask in masks))
            raise MaskError(f"{table.name}: the column {name} has {len(masks)} masks: {texts}")
        return next(iter(masks), None)

    def _about(self, table: SourceTable) -> Iterator[_Column]:
        for rule in self._rules:
            if _is_about(rule, table):
                yield from rule.columns


NO_MASKS: Final = MaskRules()


def _is_about(rule: _Rule, table: SourceTable) -> bool:
    return rule.tables.takes(table.record.schema_name, table.record.table_name)


def _kept(before: SourceTable, table: SourceTable) -> dict[str, Mask]:
    """The masks that columns had, by the names that these have now."""
    masked = before.record.masked
    masks = {
        identity: Mask.parse(masked[column.name])
        for identity, column in by_identity(before, table).items()
        if column.name in masked
    }
    now = by_identity(table, before)
    return {now[identity].name: mask for identity, mask in masks.items() if identity in now}


def _check_types(table: SourceTable, before: SourceTable, masks: Mapping[str, Mask]) -> None:
    """Check that no hashed column has another type, by which the texts of its values, and so their
    hashes, would change.
    """
    earlier = by_identity(before, table)
    for identity, column in by_identity(table, before).items():
        mask, was = masks.get(column.name), earlier.get(identity, column)
        if mask is None or not mask.is_hash or was.type == column.type:
            continue
        if not (_is_whole(was.type) and _is_whole(column.type)):
            raise MaskError(
                f"{table.name}: the hashed column {column.name} was {was.type} and is "
                f"{column.type}, whose values have other hashes than those at the target"
            )


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or bool(pa.types.is_decimal(kind) and kind.scale == 0)


def _rule(text: str) -> _Rule:
    parts = table_and_rest(text)
    columns = [part.strip() for part in parts[1].split(",")] if parts else []
    if parts is None or not all(":" in column for column in columns):
        raise MaskError(
            f"the mask rule {text!r} is not of the form SCHEMA.TABLE=COLUMN:MASK,…, such as "
            "crm.*=email:mask.hash.SHA-256,phone:mask.with.4.chars"
        )
    return _Rule(text, TableFilter((parts[0],)), tuple(map(_column, columns)))


def _column(text: str) -> _Column:
    name, _, mask = (part.strip() for part in text.rpartition(":"))
    if not name:
        raise MaskError(f"{text!r} in a mask rule names no column")
    return _Column(name, Mask.parse(mask), column_pattern(name))


def check_salted(rules: MaskRules, salt_file: str) -> None:
    """Check that there is a salt if a mask hashes, and none otherwise.

    Raises:
        MaskError: with what to do.
    """
    if rules.hashes and not salt_file:
        raise MaskError(
            "a mask that hashes needs a salt, or anybody could try values until their hashes "
            "match: write one into a file on every capture (openssl rand -hex 32), and name it "
            "by --salt-file"
        )
    if salt_file and not rules.hashes:
        raise MaskError("--salt-file is given, and no mask of --mask hashes")
