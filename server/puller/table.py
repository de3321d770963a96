"""A table as a source knows it: its schema as the metadata keeps it, its span, and how its rows are mounted. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from sink.mounted import TableMounter
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table in one version; `table_info` is a JSON document that its source reads: TiDB's TableInfo, or its own."""

    schema_name: str
    table_info: dict[str, Any]

    @property
    def table_info_json(self) -> str:
        """The document as text."""
        return json.dumps(self.table_info, separators=(",", ":"))


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
