"""Messages of our own services: what an earlier version sends keeps its number and its type.

`python -m tests.unit.test_wire` writes the golden file, after fields were added.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
GOLDEN = _ROOT / "tests" / "golden" / "messages.json"


def fields() -> dict[str, str]:
    """Each field's number, whether there are many, and type; methods, and enums' numbers."""
    found: dict[str, str] = {}
    for proto in sorted((_ROOT / "proto" / "tidemarkpb" / "v1").glob("*.proto")):
        file = importlib.import_module(f"tidemarkpb.v1.{proto.stem}_pb2").DESCRIPTOR
        for message in _all(file.message_types_by_name.values()):
            for field in message.fields:
                of = field.message_type or field.enum_type
                kind = f"{field.type} {of.full_name}" if of else str(field.type)
                found[field.full_name] = (
                    f"{field.number} {'many' if field.is_repeated else 'one'} {kind}"
                )
            for each in message.enum_types:
                found |= _numbers(each)
        for each in file.enum_types_by_name.values():
            found |= _numbers(each)
        for service in file.services_by_name.values():
            for method in service.methods:
                taken, given = method.input_type, method.output_type
                found[method.full_name] = f"{taken.full_name} {given.full_name}"
    return found


def _all(messages: Any) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from _all(message.nested_types)


def _numbers(enum: Any) -> dict[str, str]:
    return {f"{enum.full_name}.{each.name}": str(each.number) for each in enum.values}


def test_fields_keep_their_numbers_and_types() -> None:
    golden, now = json.loads(GOLDEN.read_text()), fields()
    changed = {name: (was, now.get(name)) for name, was in golden.items() if now.get(name) != was}
    assert not changed, "earlier versions would misread them"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(fields(), indent=1, sort_keys=True) + "\n")
