"""TiDB's model.TableInfo as a JSON document: read with a bound on its nesting,
and checked whole before any use.

`TableDocument` names every member that readers rely on, with its type and range; `check` compares
members with each other. Members beside these are ignored, so documents of newer and older TiDBs are
read alike. All faults are TableInfoError and name the path of the bad member, such as
`$.cols[3].type.Flen`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec

from storage.model.errors import InvalidError
from storage.tidb.field_type import INTEGERS, Flag, Type

T = TypeVar("T")
PUBLIC: Final = 5  # model.StatePublic
NESTING_MAX: Final = 64
"""Levels of arrays and objects; TiDB's own documents have fewer than ten."""
_INT64_MAX: Final = (1 << 63) - 1
_UINT32_MAX: Final = (1 << 32) - 1
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_DECIMAL_DIGITS_MAX: Final = 65
_BITS_MAX: Final = 64
_TYPES: Final = {int(each): each for each in Type}
_PRIMARY_KEY: Final = int(Flag.PRIMARY_KEY)
_TIMES: Final = frozenset({Type.TIME, Type.DATETIME, Type.TIMESTAMP})
_SECOND_DIGITS_MAX: Final = 6
_ELEMS_MAX: Final = {Type.ENUM: 65_535, Type.SET: 64}

Id = Annotated[int, msgspec.Meta(ge=1, le=_INT64_MAX)]
ColumnId = Annotated[int, msgspec.Meta(ge=1, le=_UINT32_MAX)]
"""Rows number their columns in at most 32 bits."""
Ts = Annotated[int, msgspec.Meta(ge=0, le=_INT64_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
SchemaState = Annotated[int, msgspec.Meta(ge=0, le=255)]
Default = str | int | float | None
"""TiDB writes defaults as text; numbers are taken, too, as the member has no type there."""


class TableInfoError(InvalidError):
    """A document is not a TableInfo that can be used;
    the message names the path of the bad member.
    """

    code = "ErrTableInfoInvalid"


class Name(msgspec.Struct, frozen=True, rename={"text": "O"}):
    """model.CIStr; a hidden column's name is longer than the 64 characters that TiDB's users
    have.
    """

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"\A[^\x00]*\Z")]


class FieldDocument(msgspec.Struct, frozen=True, rename="pascal"):
    """types.FieldType."""

    tp: Annotated[int, msgspec.Meta(ge=0, le=255)]
    flag: Annotated[int, msgspec.Meta(ge=0, le=_UINT32_MAX)]
    flen: Annotated[int, msgspec.Meta(ge=-1, le=_UINT32_MAX)]
    decimal: Annotated[int, msgspec.Meta(ge=-1, le=255)]
    charset: Text
    collate: Text
    elems: tuple[str, ...] | None = None


class ColumnDocument(msgspec.Struct, frozen=True):
    """model.ColumnInfo."""

    id: ColumnId
    name: Name
    type: FieldDocument
    offset: Offset
    state: SchemaState
    origin_default: Default = None
    origin_default_bit: bytes | None = None
    default: Any = None
    """No row depends on it."""
    default_bit: bytes | None = None
    generated_expr_string: str = ""
    generated_stored: bool = False
    hidden: bool = False

    @property
    def is_shown(self) -> bool:
        """Whether readers may see its values."""
        is_virtual = self.generated_expr_string and not self.generated_stored
        return self.state == PUBLIC and not self.hidden and not is_virtual


class IndexColumnDocument(msgspec.Struct, frozen=True):
    """model.IndexColumn."""

    offset: Offset
    length: Annotated[int, msgspec.Meta(ge=-1, le=_UINT32_MAX)]


class IndexDocument(msgspec.Struct, frozen=True):
    """model.IndexInfo."""

    id: Id
    idx_name: Name
    idx_cols: Annotated[tuple[IndexColumnDocument, ...], msgspec.Meta(min_length=1)]
    state: SchemaState
    is_unique: bool
    is_primary: bool


class DefinitionDocument(msgspec.Struct, frozen=True):
    """model.PartitionDefinition."""

    id: Id


class PartitionDocument(msgspec.Struct, frozen=True):
    """model.PartitionInfo."""

    enable: bool = False
    definitions: tuple[DefinitionDocument, ...] | None = None
    dropping_definitions: tuple[DefinitionDocument, ...] | None = None


class RemovedDocument(msgspec.Struct, frozen=True):
    """The content of `storage.tidb.schema_history.REMOVED`."""

    ts: Ts
    partition_ids: tuple[Id, ...]


class ModifiedDocument(msgspec.Struct, frozen=True):
    """The content of `storage.tidb.schema_history.MODIFIED`."""

    ts: Ts
    alone: bool
    added: Annotated[int, msgspec.Meta(ge=0)] = 0


class RereadDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `server.puller.tidb.table.Reread`."""

    ts: Ts
    emptied: bool


class TableHead(msgspec.Struct, frozen=True):
    """The members of a TableInfo by which tables are told apart;
    all that a table nobody replicates needs.
    """

    id: Id
    name: Name
    partition: PartitionDocument | None = None
    view: dict[str, Any] | None = None
    sequence: dict[str, Any] | None = None

    @property
    def has_rows(self) -> bool:
        """Whether it is neither a view nor a sequence."""
        return self.view is None and self.sequence is None

    @property
    def partition_ids(self) -> tuple[int, ...]:
        """The ids of its partitions; none if it is not partitioned."""
        if self.partition is None or not self.partition.enable:
            return ()
        return tuple(definition.id for definition in self.partition.definitions or ())

    @property
    def dropping_ids(self) -> tuple[int, ...]:
        """The ids of partitions that a job which is not done yet removes."""
        dropping = self.partition.dropping_definitions if self.partition is not None else None
        return tuple(definition.id for definition in dropping or ())


class TableDocument(TableHead, frozen=True, kw_only=True):
    """model.TableInfo, and members of ours."""

    pk_is_handle: bool
    is_common_handle: bool = False
    softdelete_info: dict[str, Any] | None = None
    cols: Annotated[tuple[ColumnDocument, ...], msgspec.Meta(max_length=65_535)] | None = None
    index_info: tuple[IndexDocument, ...] | None = None
    tidemark_removed: RemovedDocument | None = None
    tidemark_modified: ModifiedDocument | None = None
    tidemark_reread: RereadDocument | None = None
    tidemark_columns: tuple[str, ...] | None = None

    def check(self) -> None:
        """Compare the members with each other.

        Raises:
            TableInfoError: they contradict each other, or no row could be read.
        """
        columns, indices = self.cols or (), self.index_info or ()
        if not self.has_rows:
            return
        _distinct("$.partition.definitions", "id", self.partition_ids)
        _distinct("$.cols", "id", (column.id for column in columns))
        _distinct(
            "$.cols",
            "name",
            (column.name.text.lower() for column in columns if column.state == PUBLIC),
        )
        for place, column in enumerate(columns):
            _check_column(f"$.cols[{place}]", column)
        if sorted(column.offset for column in columns) != list(range(len(columns))):
            raise TableInfoError(
                f"$.cols: their offsets are not the numbers from 0 to {len(columns) - 1}, each once"
            )
        for place, index in enumerate(indices):
            _check_index(f"$.index_info[{place}]", index, len(columns))
        _distinct("$.index_info", "id", (index.id for index in indices))
        self._check_handle(columns, indices)

    def _check_handle(
        self, columns: Sequence[ColumnDocument], indices: Sequence[IndexDocument]
    ) -> None:
        # a DDL that rebuilds it has another one beside it meanwhile
        primary = [index for index in indices if index.is_primary and index.state == PUBLIC]
        if len(primary) > 1:
            raise TableInfoError("$.index_info: more than one index is primary")
        if self.pk_is_handle and self.is_common_handle:
            raise TableInfoError(
                "$.is_common_handle: true beside pk_is_handle; a table has one kind of handle"
            )
        if self.is_common_handle and not primary:
            raise TableInfoError("$.is_common_handle: true, but no index is primary")
        if self.pk_is_handle:
            keys = [column for column in columns if column.type.flag & _PRIMARY_KEY]
            if len(keys) != 1 or keys[0].type.tp not in INTEGERS or not keys[0].is_shown:
                raise TableInfoError(
                    "$.pk_is_handle: true, but the primary key is not one integer column to be seen"
                )


def read_document(text: str | bytes) -> dict[str, Any]:
    """Any JSON object, as long as it is not nested too deeply to be handled.

    Raises:
        TableInfoError: it is something else.
    """
    check_nesting(text)
    return _decoded(lambda: msgspec.json.decode(text, type=dict[str, Any]))


def table_document(source: str | bytes | Mapping[str, Any]) -> TableDocument:
    """A TableInfo, from its text or its JSON value, checked.

    Raises:
        TableInfoError: it cannot be used.
    """
    document = source if isinstance(source, Mapping) else read_document(source)
    try:
        table = _decoded(lambda: msgspec.convert(document, TableDocument))
        table.check()
    except TableInfoError as err:
        raise TableInfoError(f"the TableInfo of {_name(document)}: {err.message}") from err
    return table


def table_head(document: object) -> TableHead:
    """The members that every table has, of its JSON value; raises as `table_document`."""
    try:
        return _decoded(lambda: msgspec.convert(document, TableHead))
    except TableInfoError as err:
        raise TableInfoError(f"the TableInfo of {_name(document)}: {err.message}") from err


def check_nesting(text: str | bytes) -> None:
    """Refuse JSON that is nested more deeply than NESTING_MAX, before a parser recurses into it.

    Raises:
        TableInfoError: it is.
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    # Brackets in strings do not count: with escapes gone, every second part between quotes is one.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_BRACKETS)
    depth = 0
    for outside in plain.split(b'"')[::2]:
        for bracket in outside:
            depth += 1 if bracket in b"[{" else -1
            if depth > NESTING_MAX:
                raise TableInfoError(f"$: nested more than {NESTING_MAX} levels deep")


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except msgspec.ValidationError as err:
        what, at, path = str(err).rpartition(" - at `")
        raise TableInfoError(f"{path.removesuffix('`')}: {what}" if at else f"$: {err}") from err
    except (msgspec.DecodeError, UnicodeError, RecursionError) as err:
        raise TableInfoError(f"$: not a JSON object: {err}") from err


def _name(document: Any) -> str:
    name = document.get("name") if isinstance(document, Mapping) else None
    text = name.get("O") if isinstance(name, Mapping) else None
    return repr(text[:256]) if isinstance(text, str) else "a table without a name"


def _distinct(path: str, member: str, values: Iterable[Hashable]) -> None:
    every = list(values)
    # Counting costs five times as much, and there are a hundred thousand tables.
    if len(set(every)) < len(every):
        twice = [value for value, count in Counter(every).items() if count > 1]
        raise TableInfoError(f"{path}: more than one has the {member} {twice[0]!r}")


def _check_column(path: str, column: ColumnDocument) -> None:
    field = column.type
    kind = _TYPES.get(field.tp)
    if kind is None:
        raise TableInfoError(
            f"{path}.type.Tp: {field.tp} is no column type that this version knows"
        )
    if kind is Type.NEWDECIMAL and not (
        1 <= field.flen <= _DECIMAL_DIGITS_MAX
        and field.decimal <= min(field.flen, _DECIMAL_DIGITS_MAX)
    ):
        raise TableInfoError(
            f"{path}.type: a DECIMAL of {field.flen} digits with {field.decimal} behind the point"
        )
    if kind is Type.BIT and not 1 <= field.flen <= _BITS_MAX:
        raise TableInfoError(
            f"{path}.type.Flen: a BIT of {field.flen} bits; it has 1 to {_BITS_MAX}"
        )
    if kind in _TIMES and field.decimal > _SECOND_DIGITS_MAX:
        raise TableInfoError(
            f"{path}.type.Decimal: {field.decimal} digits of a second; there are at most 6"
        )
    elems_max = _ELEMS_MAX.get(kind)
    if elems_max is not None and len(field.elems or ()) > elems_max:
        raise TableInfoError(
            f"{path}.type.Elems: {len(field.elems or ())} members; there are at most {elems_max}"
        )
    if kind is Type.BIT and len(column.origin_default_bit or b"") > _BITS_MAX // 8:
        raise TableInfoError(f"{path}.origin_default_bit: more than 8 bytes")


def _check_index(path: str, index: IndexDocument, columns: int) -> None:
    for place, part in enumerate(index.idx_cols):
        if part.offset >= columns:
            raise TableInfoError(
                f"{path}.idx_cols[{place}].offset: {part.offset}, but there are {columns} columns"
            )
    _distinct(f"{path}.idx_cols", "offset", (part.offset for part in index.idx_cols))


# msgspec prepares a class at its first use, and a thread that uses the class meanwhile crashes the
# process: captures read the tables of several changefeeds at a time. While this module is imported,
# no other thread can.
for _document in (TableHead, TableDocument):
    msgspec.json.Decoder(_document)
