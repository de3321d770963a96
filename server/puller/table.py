"""A table as a source knows it: its schema as the metadata keeps it, its span, and how its rows are mounted. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from sink.mounted import TableMounter
from storage.model.errors import InvalidError
from storage.model.span import Span


class TableIneligibleError(InvalidError):
    """The table cannot be replicated; the message names it and says why."""

    code = "ErrTableIneligible"


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table in one version; `table_info` is a JSON document that its source reads: TiDB's TableInfo, or its own."""

    schema_name: str
    table_info: dict[str, Any]

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
