"""Output of `tidemark cli`: exactly one JSON document with --json, else a table or `name: value`
lines; repeated with --watch.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from server.cli.arguments import add_flag, seconds
from server.exit_status import EXIT_OK

TABLE, WIDE, JSON, YAML = FORMS = ("table", "wide", "json", "yaml")
"""The formats of output; `wide` has a column for every member of a list's rows."""
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NO_PLAIN_KEYS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_WATCH_EVERY_S: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J"
"""Home, and clear the screen."""


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

    def text(self, *, as_json: bool = False, form: str = TABLE) -> str:
        """The text for stdout, in one of `FORMS`."""
        if as_json or form == JSON:
            return json.dumps(self.document, ensure_ascii=False)
        if form == YAML:
            return "\n".join(_yaml(self.document, ""))
        if form == WIDE and isinstance(self.document, list) and self.document:
            return table(self.document, _all_columns(self.document))
        if self.shown is not None:
            return self.shown
        if isinstance(self.document, list):
            return table(self.document, self.columns)
        return "\n".join(_lines(self.document, ""))


def plain(message: Message) -> dict[str, Any]:
    """Return a protobuf message with all its members, numbers as numbers; unset optional members
    are None.
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


def _all_columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    paths = dict.fromkeys(path for row in rows for path in _paths(row, ""))
    return [(path.rpartition(".")[2].upper().replace("_", " "), path) for path in paths]


def _paths(row: Mapping[str, Any], before: str) -> Iterator[str]:
    for name, member in row.items():
        if isinstance(member, Mapping):
            yield from _paths(member, f"{before}{name}.")
        else:
            yield before + name


def _yaml(value: Any, indent: str) -> list[str]:
    """Blocks, whose scalars are JSON's, which YAML takes as they are."""
    if isinstance(value, Mapping) and value:
        lines = []
        for name, member in value.items():
            lines += _yaml_entry(f"{indent}{_yaml_key(str(name))}:", member, indent)
        return lines
    if isinstance(value, list) and value:
        lines = []
        for member in value:
            inner = _yaml(member, indent + "  ")
            lines += [f"{indent}- {inner[0].lstrip()}", *inner[1:]]
        return lines
    return [indent + json.dumps(value, ensure_ascii=False)]


def _yaml_entry(head: str, member: Any, indent: str) -> list[str]:
    if member and isinstance(member, Mapping | list):
        return [head, *_yaml(member, indent + "  ")]
    return [f"{head} {json.dumps(member, ensure_ascii=False)}"]


def _yaml_key(name: str) -> str:
    plain = _PLAIN.fullmatch(name) and name.lower() not in _NO_PLAIN_KEYS
    return name if plain else json.dumps(name, ensure_ascii=False)


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


def add_verbose(verb: argparse.ArgumentParser) -> None:
    """Add the flag of verbs that confirm a change in short."""
    add_flag(verb, "-v", "--verbose", text="print all fields, as `query` and -o json do")


def confirmed(arguments: argparse.Namespace, document: dict[str, Any], *said: str) -> Output:
    """A verb's outcome: in the lines `said` that are not empty, or whole with `--verbose`."""
    warnings = [f"warning: {each}" for each in document.get("warnings", ())]
    short = "\n".join(filter(None, [*said, *warnings]))
    return Output(document, shown=None if arguments.verbose else short)


def add_watch(verb: argparse.ArgumentParser) -> None:
    """Add the flag."""
    verb.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=_WATCH_EVERY_S,
        metavar="SECONDS",
        help=f"show it again and again (every {_WATCH_EVERY_S:g} s), until Ctrl-C",
    )


async def shown_again(
    every_s: float, ask: Callable[[], Awaitable[Output]], show: Callable[[Output], None]
) -> None:
    """Show the output again and again until cancelled; a terminal shows the newest only. Raises
    what `ask` raises.
    """
    while True:
        output = await ask()
        if sys.stdout.isatty():
            sys.stdout.write(_CLEAR)
        show(output)
        sys.stdout.flush()
        await asyncio.sleep(every_s)
