"""A value of a few fields that the metadata keeps as a JSON object of these. Pure."""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from storage.model.errors import CorruptError


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """Values that are kept as JSON; `what` names them in errors."""

    what: ClassVar[str]

    def to_json(self) -> bytes:
        """The JSON that the metadata keeps."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            return cls(**json.loads(value))
        except (ValueError, TypeError, RecursionError) as err:
            raise CorruptError(f"{cls.what} in the metadata cannot be read: {err!r}") from err
