"""JSON text of binary JSON: what TiDB and MySQL print alike. Their binary forms and their numbers differ. Pure."""

import base64
import json

from storage.model.errors import CorruptError


def quoted(text: str) -> str:
    """A string."""
    return json.dumps(text, ensure_ascii=False)


def opaque(kind: int, content: bytes) -> str:
    """A value of the column type `kind` that JSON does not have."""
    return f'"base64:type{kind}:{base64.b64encode(content).decode()}"'


def content(data: bytes, at: int, size: int) -> bytes:
    """The `size` bytes of a value at `at`.

    Raises:
        CorruptError: it is longer than the cell.
    """
    if at + size > len(data):
        raise CorruptError(f"binary JSON of {len(data)} bytes ends within a value at {at}")
    return data[at : at + size]
