"""How `tidemark cli` prints: exactly one JSON document with --json, else a table or `name:
value` lines.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from server.daemon import EXIT_OK


@dataclass(frozen=True, slots=True)
class Output:
    """A command's result: the document, and how people see it.

    A list is shown by `columns` (title, path of members), a document as lines, unless `shown` is
    the text to print.
    """

    document: Any
    columns: Sequence[tuple[str, str]] = field(default_factory=tuple)
    shown: str | None = None
    status: int = EXIT_OK
    """The exit code, where a command has something to say by it."""

    def text(self, *, as_json: bool) -> str:
        """What goes to stdout."""
        if as_json:
            return json.dumps(self.document, ensure_ascii=False)
        if self.shown is not None:
            return self.shown
        if isinstance(self.document, list):
            return table(self.document, self.columns)
        return "\n".join(_lines(self.document, ""))


def plain(message: Message) -> dict[str, Any]:
    """A protobuf message with all its members, numbers as numbers;
    what is unset and could be told so is None.
    """
    return {field.name: _member_of(message, field) for field in message.DESCRIPTOR.fields}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    """Rows under titles, as wide as needed."""
    cells = [[title for title, _ in columns]]
    cells += [[_shown(_member(row, path)) for _, path in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _member_of(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Mapping):
        return dict(value)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(part) for part in value] if is_message else list(value)
    if field.has_presence and not message.HasField(field.name):
        return None
    return plain(value) if is_message else value


def _member(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _lines(value: Any, indent: str) -> list[str]:
    lines: list[str] = []
    for name, member in value.items():
        if isinstance(member, Mapping):
            lines += [f"{indent}{name}:", *_lines(member, indent + "  ")]
        elif isinstance(member, list) and member and isinstance(member[0], Mapping):
            lines.append(f"{indent}{name}:")
            lines += [
                f"{indent}  - {', '.join(f'{key}: {_shown(part)}' for key, part in row.items())}"
                for row in member
            ]
        else:
            lines.append(f"{indent}{name}: {_shown(member)}")
    return lines
