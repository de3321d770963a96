"""A table as a source knows it: its schema as the metadata keeps it, its span, and how its rows are mounted. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sink.mounted import TableMounter
from sink.selected import SelectedMounter
from storage.model.errors import InvalidError
from storage.model.span import Span

_SELECTED: Final = "tidemark_columns"


class TableIneligibleError(InvalidError):
    """The table cannot be replicated; the message names it and says why."""

    code = "ErrTableIneligible"


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table in one version; `table_info` is a JSON document that its source reads: TiDB's TableInfo, or its own."""

    schema_name: str
    table_info: dict[str, Any]

    @property
    def selected(self) -> Sequence[str] | None:
        """The columns that the changefeed takes of it; None: all. A member of the document that is ours."""
        return self.table_info.get(_SELECTED)

    @property
    def whole(self) -> "TableRecord":
        """As the upstream has it, whatever is taken of it."""
        info = {member: value for member, value in self.table_info.items() if member != _SELECTED}
        return TableRecord(self.schema_name, info)

    def selecting(self, columns: Sequence[str]) -> "TableRecord":
        """The same table, of which these columns are taken, and those of its key."""
        return TableRecord(self.schema_name, {**self.table_info, _SELECTED: list(columns)})

    @property
    def table_info_json(self) -> str:
        """The document as text."""
        return json.dumps(self.table_info, separators=(",", ":"))

    @property
    def table_name(self) -> str:
        """The table's own name; TiDB writes it in its own case and in lower case.

        Raises:
            InvalidError: the document has none.
        """
        name = self.table_info.get("name")
        name = name.get("O") if isinstance(name, dict) else name
        if not isinstance(name, str):
            raise InvalidError(f"a table of schema {self.schema_name!r} has a table_info without a name")
        return name

    @property
    def name(self) -> str:
        """`schema.table`; raises as `table_name`."""
        return f"{self.schema_name}.{self.table_name}"


@dataclass(frozen=True, slots=True)
class SourceTable:
    """One span and how its rows are mounted; `record` is what it was made of."""

    record: TableRecord
    span: Span
    mounter: TableMounter

    @property
    def name(self) -> str:
        """`schema.table`."""
        return self.mounter.name


def taken(record: TableRecord, whole: TableMounter) -> TableMounter:
    """The mounter of what is taken of a table, made of the one of all of it."""
    return whole if record.selected is None else SelectedMounter(whole, record.selected)
