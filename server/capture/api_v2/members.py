"""The members of the JSON objects in requests: each is taken once, and checked. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from server.capture.errors import ParameterError
from storage.model.ts import MAX_TS

Check = Callable[[Any], bool]
_UINT32_MAX: Final = (1 << 32) - 1


class Members:
    """The members of an object that were not taken yet."""

    def __init__(self, document: Mapping[str, Any], path: str = "") -> None:
        self.left = dict(document)
        self._path = path

    def take(self, name: str, check: Check, *, default: Any) -> Any:
        """A member's value; `default` if it is left out, or null."""
        value = self.left.pop(name, None)
        if value is None:
            return default
        if not check(value):
            shown = json.dumps(value)[:100]
            raise ParameterError(f"{self._path}{name} cannot be {shown}: see GET openapi.json")
        return value

    def check_empty(self) -> None:
        """See that nothing is left; raises ParameterError."""
        if self.left:
            names = ", ".join(sorted(f"{self._path}{name}"[:100] for name in self.left))
            raise ParameterError(f"{names}: no such member; see GET openapi.json")


def is_object(value: Any) -> bool:
    """Whether it is an object."""
    return isinstance(value, dict)


def is_text(value: Any) -> bool:
    """Whether it is a text without control characters."""
    return isinstance(value, str) and value.isprintable()


def is_texts(value: Any) -> bool:
    """Whether it is a list of such texts."""
    return isinstance(value, list) and all(map(is_text, value))


def are_objects(value: Any) -> bool:
    """Whether it is a list of objects."""
    return isinstance(value, list) and all(map(is_object, value))


def is_flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_ts(value: Any) -> bool:
    """Whether it is a timestamp."""
    return type(value) is int and 0 <= value <= MAX_TS


def is_uint32(value: Any) -> bool:
    """Whether it is a number of 32 bits."""
    return type(value) is int and 0 <= value <= _UINT32_MAX
