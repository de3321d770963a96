"""Documents that are nearly right: one JSON value with a few members changed, moved,
doubled or left out. Seeded.
"""

import copy
import json
import random
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    5,
    63,
    64,
    65,
    255,
    256,
    65_535,
    65_536,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
)
ODD = (
    *NUMBERS, -(2**63), 0.5, 1e308, True, False, None, "", "a", "A", "\x00", "x" * 300, "9" * 400, "-", "1e999999999",
    "0000-00-00", "838:59:59", "\u00e9", "\U0001f4a5", "=", "QUJD", [], {}, [[]], [None], [1, 1], {"O": "a"}, {"O": 5},
    {"id": 1}, {"ts": 1}, {"enable": True, "definitions": [{"id": 7}, {"id": 7}]},
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all members below the root."""
    members = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    found = []
    for key, value in members:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def mutated(document: Any, chance: random.Random) -> str:
    """JSON text of the document with one to four mutations; now and then it is no JSON any more."""
    changed = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _mutate(changed, chance)
    text = json.dumps(changed, ensure_ascii=chance.random() < 0.5)
    if chance.random() < 0.1:
        return _broken(text, chance)
    return text


def _mutate(document: Any, chance: random.Random) -> None:
    paths = places(document)
    if not paths:
        return
    path = chance.choice(paths)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    match chance.randrange(6):
        case 0:
            del holder[path[-1]]
        case 1 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        case 2:
            other = document
            for key in chance.choice(paths):
                if not isinstance(other, dict | list) or (
                    isinstance(other, list) and not -1 < key < len(other)
                ):
                    break
                other = other[key] if isinstance(other, list) else other.get(key)
            holder[path[-1]] = copy.deepcopy(other)
        case 3 if isinstance(holder, dict):
            holder["tidemark_" + chance.choice(("columns", "removed"))] = copy.deepcopy(
                chance.choice(ODD)
            )
        case _:
            holder[path[-1]] = copy.deepcopy(chance.choice(ODD))


def _broken(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    match chance.randrange(5):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + chance.choice('[]{}",:\\x00') + text[at:]
        case 2:
            return "[" * 100_000
        case 3:
            return text[:at] + '{"a":' * 5_000
        case _:
            return text[:at] + "NaN" + text[at + 1 :]
