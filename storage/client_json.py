"""Reads JSON from clients, which other programs wrote, not always by the rules."""

import json
from collections import Counter
from typing import Any


def read_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ValueError: it is no JSON, is nested too deeply, has `NaN` or `Infinity`, a member twice, of
            which one would go unheard, or a string with half of a surrogate pair: that is no
            Unicode text, and could neither be stored nor be put into an answer.
    """
    try:
        document = json.loads(
            body.decode(), parse_constant=_no_constant, object_pairs_hook=_each_once
        )
    except RecursionError as err:
        raise ValueError("brackets are nested too deeply") from err
    if b"\\u" in body:
        _check_unicode(document)
    return document


def _check_unicode(document: Any) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as err:
        raise ValueError("a string of it is no Unicode text: half of a surrogate pair") from err


def _each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(members)
    if len(document) < len(members):
        [(name, _)] = Counter(name for name, _ in members).most_common(1)
        raise ValueError(f"the member {name[:100]!r} is there twice")
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")
