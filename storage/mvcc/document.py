"""Small JSON documents that a store keeps in its META column, each with the number of its format. Pure.

docs/format/mvcc.md.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.model.errors import CorruptError


def encode_document(known: int, **fields: Any) -> bytes:
    """A document of the format `known`."""
    return json.dumps({"format": known, **fields}).encode()


@contextmanager
def reading_document(data: bytes, known: int, what: str) -> Iterator[Any]:
    """What `encode_document` wrote, for a block that takes it apart; `what` names it in errors.

    Raises:
        CorruptError: it is no such document, has another format, or lacks what the block looks for.
    """
    try:
        document = json.loads(data)
        if document["format"] != known:
            raise CorruptError(f"{what} has format {document['format']}; this program knows {known}")
        yield document
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptError(f"{what} is damaged: {err}; restore the store from a backup") from err
