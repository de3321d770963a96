"""How `tidemark cli` prints: exactly one JSON document with --json, else a table or `name: value` lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """A command's result: the document, and the columns (title, path of members) to show of a list."""

    document: Any
    columns: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def text(self, *, as_json: bool) -> str:
        """What goes to stdout."""
        if as_json:
            return json.dumps(self.document, ensure_ascii=False)
        if isinstance(self.document, list):
            return _table(self.document, self.columns)
        return "\n".join(_lines(self.document, ""))


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> str:
    cells = [[title for title, _ in columns]]
    cells += [[_shown(_member(row, path)) for _, path in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


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
                f"{indent}  - {', '.join(f'{key}: {_shown(part)}' for key, part in row.items())}" for row in member
            ]
        else:
            lines.append(f"{indent}{name}: {_shown(member)}")
    return lines
