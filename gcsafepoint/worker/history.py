"""The rounds that were, in the metadata store: the last hundred, and those that run, as they entered their phases."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from gcsafepoint.worker.records import ROUNDS, Records
from gcsafepoint.worker.round import Phase, Result, Round
from storage.model.ts import physical_ms

KEPT = 100
_MOST_CHANGES = 100  # of one transaction of the metadata store


def key_of(it: Round) -> str:
    """Where the round is recorded; keys sort by start."""
    return f"{ROUNDS}{it.id:020d}"


def to_json(it: Round) -> str:
    """The record's value."""
    return json.dumps(asdict(it) | {"phase": it.phase.name})


def from_json(key: str, text: str) -> Round:
    """Read what `to_json` wrote; anything else becomes a failed round that says so."""
    try:
        fields = json.loads(text)
        known = {"phase": Phase[fields["phase"]], "result": Result(fields["result"])}
        return Round(**(fields | known))
    except (ValueError, TypeError, KeyError):
        number = int(key.removeprefix(ROUNDS)) if key.removeprefix(ROUNDS).isdecimal() else 0
        return Round(
            id=number,
            phase=Phase.ENDED,
            started_ms=physical_ms(number),
            result=Result.FAILED,
            error=f"the record {key} cannot be read: {text!r}",
        )


async def load(records: Records, limit: int = KEPT) -> list[Round]:
    """The newest `limit` rounds, newest first."""
    held = await records.read(ROUNDS)
    return [from_json(key, held[key].value) for key in sorted(held, reverse=True)[:limit]]


async def tidy(records: Records, running: Iterable[int], now_ms: int, fence: Mapping[str, int]) -> None:
    """Make room for one more round, and say of those that their worker left unfinished that it did."""
    held, alive = await records.read(ROUNDS), frozenset(running)
    keys = sorted(held)
    changes: dict[str, str | None] = dict.fromkeys(keys[: max(0, len(keys) - KEPT + 1)])
    for key in keys:
        it = from_json(key, held[key].value)
        if key not in changes and it.phase is not Phase.ENDED and it.id not in alive:
            changes[key] = to_json(_abandoned(it, now_ms))
    if changes:
        await records.write(dict(list(changes.items())[:_MOST_CHANGES]), fence)


def _abandoned(it: Round, now_ms: int) -> Round:
    error = f"its worker {it.worker} was gone in the phase {it.phase.label}; the next round did what was left"
    return replace(it, phase=Phase.ENDED, ended_ms=now_ms, result=Result.ABANDONED, error=error)
