"""The records that outlive a worker, in the metadata store: variables, leader, safepoint, ranges to
destroy, rounds.

Keys below `/tidemark/default/gc/`: the variables of mysql.tidb by their names;
`gc.max-write-bytes-per-sec` in plain bytes, which stores watch; `leader_addr`; `safe_point_ts` and
`collected_ts`; `do_gc`; `delete_range/<job>/<element>`, `delete_range_done/<job>/<element>`;
`round/<id>`. A leader writes only on condition that it still is the leader.

`Records` is the Protocol that `server.gc_worker` implements over the metadata client. The history
has the last hundred rounds, and those that run, as they entered their phases.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from gcsafepoint.worker.config import (
    BOUNDS,
    COMMENTS,
    MAX_WRITE_BYTES,
    STATE_VARIABLES,
    UNBOUND,
    VARIABLE_PREFIX,
    Bounds,
    GCConfig,
    format_size,
)
from gcsafepoint.worker.round import Phase, Result, Round
from storage.model.errors import CorruptError
from storage.model.ts import physical_ms

PREFIX = "/tidemark/default/gc/"
LEADER_UUID, LEADER_DESC, LEADER_LEASE, LAST_RUN_TIME, SAFE_POINT = (
    f"{PREFIX}{name}" for name in STATE_VARIABLES
)
LEADER_ADDR = f"{PREFIX}leader_addr"
# exactly; the variable of mysql.tidb is cut to seconds
SAFE_POINT_TS = f"{PREFIX}safe_point_ts"
# the safepoint of the last round that did all its work
COLLECTED_TS = f"{PREFIX}collected_ts"
DO_GC = f"{PREFIX}do_gc"
PENDING, DONE = f"{PREFIX}delete_range/", f"{PREFIX}delete_range_done/"
ROUNDS = f"{PREFIX}round/"
MAX_WRITE_BYTES_KEY = f"{PREFIX}{MAX_WRITE_BYTES}"
RUNNING = "/tidb/server/minstartts/"
ROUNDS_KEPT = 100
_MOST_CHANGES = 100  # of one transaction of the metadata store
_SETTINGS = tuple(GCConfig().variables())


@dataclass(frozen=True, slots=True)
class Record:
    """A value and the revision that last wrote it."""

    value: str
    revision: int


class Records(Protocol):
    """The metadata store."""

    async def read(self, prefix: str) -> dict[str, Record]:
        """All records whose key starts with `prefix`, at one revision."""
        ...

    async def write(self, changes: Mapping[str, str | None], expect: Mapping[str, int]) -> int:
        """Put and delete (None) together if every key of `expect` is at that revision (0: absent).

        Returns the new revision, 0 if nothing was written because an expectation failed. Durable
        when it returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables in force, and the revisions at which each was read."""

    config: GCConfig
    revisions: Mapping[str, int]


async def read_settings(records: Records) -> Settings:
    """The variables in force; those that were never set have their defaults.

    Raises:
        GCConfigError: somebody wrote a value that cannot be used.
    """
    variables = await _variables(records)
    recorded = {
        name: variables[f"{PREFIX}{name}"] for name in _SETTINGS if f"{PREFIX}{name}" in variables
    }
    config = GCConfig().updated({name: record.value for name, record in recorded.items()}, UNBOUND)
    revisions = {
        f"{PREFIX}{name}": recorded[name].revision if name in recorded else 0 for name in _SETTINGS
    }
    return Settings(config, revisions)


async def read_config(records: Records) -> GCConfig:
    """The configuration of `read_settings`; raises as it does."""
    return (await read_settings(records)).config


async def write_config(
    records: Records, variables: Mapping[str, str], bounds: Bounds = BOUNDS
) -> GCConfig:
    """Set variables; returns all of them. In force from the next tick on, durable when it returns.

    Raises:
        GCConfigError: unknown names or bad values; nothing was set.
    """
    # First alone: the faults of the new values are named even where what is stored cannot be read.
    GCConfig().updated(variables, bounds)
    config = (await read_config(records)).updated(variables, bounds)
    stored = config.stored()
    await records.write({f"{PREFIX}{name}": stored[name] for name in variables}, {})
    return config


async def read_table(records: Records) -> list[tuple[str, str, str]]:
    """Name, value and comment of every variable, in the order of mysql.tidb;
    values as they stand, even bad ones.
    """
    variables = await _variables(records)
    recorded = {
        name: variables[f"{PREFIX}{name}"].value
        for name in COMMENTS
        if f"{PREFIX}{name}" in variables
    }
    values = GCConfig().variables() | recorded
    if values[MAX_WRITE_BYTES].isdecimal():
        values[MAX_WRITE_BYTES] = format_size(int(values[MAX_WRITE_BYTES]))
    return [(name, values.get(name, ""), comment) for name, comment in COMMENTS.items()]


async def _variables(records: Records) -> dict[str, Record]:
    return await records.read(f"{PREFIX}{VARIABLE_PREFIX}") | await records.read(
        MAX_WRITE_BYTES_KEY
    )


async def read_ts(records: Records, key: str) -> int:
    """The timestamp recorded at `key`, 0 if there is none.

    Raises:
        CorruptError: something else is there.
    """
    recorded = await records.read(key)
    text = recorded[key].value if key in recorded else "0"
    if not text.isdecimal():
        raise CorruptError(
            f"the record {key} holds {text!r} instead of a timestamp; correct it, or delete it"
        )
    return int(text)


async def oldest_running(records: Records) -> tuple[int, str] | None:
    """The smallest start_ts that TiDB servers report as running, with its server; None if nothing
    runs.

    A server without transactions, or one that wrote something else, holds nothing back (TiDB's
    rule).
    """
    reports = await records.read(RUNNING)
    running = [
        (int(record.value), key.removeprefix(RUNNING))
        for key, record in reports.items()
        if record.value.isdecimal() and int(record.value)
    ]
    return min(running, default=None)


def round_key(gc_round: Round) -> str:
    """The key of a round's record; keys sort by start."""
    return f"{ROUNDS}{gc_round.id:020d}"


def round_to_json(gc_round: Round) -> str:
    """The record's value."""
    return json.dumps(asdict(gc_round) | {"phase": gc_round.phase.name})


def round_from_json(key: str, text: str) -> Round:
    """Read what `to_json` wrote; anything else becomes a failed round that says so."""
    try:
        fields = json.loads(text)
        enums = {"phase": Phase[fields["phase"]], "result": Result(fields["result"])}
        return Round(**(fields | enums))
    except (ValueError, TypeError, KeyError):
        number = int(key.removeprefix(ROUNDS)) if key.removeprefix(ROUNDS).isdecimal() else 0
        return Round(
            id=number,
            phase=Phase.ENDED,
            started_ms=physical_ms(number),
            result=Result.FAILED,
            error=f"the record {key} cannot be read: {text!r}",
        )


async def load_rounds(records: Records, limit: int = ROUNDS_KEPT) -> list[Round]:
    """The newest `limit` rounds, newest first."""
    recorded = await records.read(ROUNDS)
    return [
        round_from_json(key, recorded[key].value) for key in sorted(recorded, reverse=True)[:limit]
    ]


async def tidy_rounds(
    records: Records, running: Iterable[int], now_ms: int, fence: Mapping[str, int]
) -> None:
    """Make room for one more round, and mark the rounds whose worker is gone as abandoned."""
    recorded, alive = await records.read(ROUNDS), frozenset(running)
    # Keys sort by start, so the first ones are the oldest.
    keys = sorted(recorded)
    changes: dict[str, str | None] = dict.fromkeys(keys[: max(0, len(keys) - ROUNDS_KEPT + 1)])
    for key in keys:
        gc_round = round_from_json(key, recorded[key].value)
        if key not in changes and gc_round.phase is not Phase.ENDED and gc_round.id not in alive:
            changes[key] = round_to_json(_abandoned(gc_round, now_ms))
    if changes:
        # what one transaction has no room for is left to the next round
        await records.write(dict(list(changes.items())[:_MOST_CHANGES]), fence)


def _abandoned(gc_round: Round, now_ms: int) -> Round:
    worker, phase = gc_round.worker, gc_round.phase.label
    error = f"its worker {worker} was gone in the phase {phase}; the next round did what was left"
    return replace(
        gc_round, phase=Phase.ENDED, ended_ms=now_ms, result=Result.ABANDONED, error=error
    )
