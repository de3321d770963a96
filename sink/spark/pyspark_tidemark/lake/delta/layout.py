"""How a Delta table's files are laid out: where they are, what they call the table's columns."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

_FIELD_ID = b"PARQUET:field_id"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is needed to read and write a table's files."""

    root: str
    schema: Any
    """The table's columns (pyarrow.Schema)."""
    physical: Mapping[str, str]
    """What files call them."""
    ids: Mapping[str, int]
    """Their field ids; none without column mapping."""

    def location(self, add: Mapping[str, Any]) -> str:
        """Where the file of an action is."""
        return f"{self.root}/{unquote(add['path'])}"

    @property
    def stored(self) -> Any:
        """The schema of a new file."""
        return pa.schema([self._stored(field) for field in self.schema])

    def _stored(self, field: Any) -> Any:
        number = self.ids.get(field.name)
        metadata = None if number is None else {_FIELD_ID: str(number)}
        return pa.field(self.physical[field.name], field.type, metadata=metadata)
