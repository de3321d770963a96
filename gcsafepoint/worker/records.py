"""What outlives a worker, in the metadata store: variables, leader, safepoint, ranges to destroy, history.

Keys below `/tidemark/default/gc/`: the variables of mysql.tidb by their names; `gc.max-write-bytes-per-sec` in plain
bytes, which stores watch; `leader_addr`; `safe_point_ts` and `collected_ts`; `do_gc`; `delete_range/<job>/<element>`,
`delete_range_done/<job>/<element>`; `round/<id>`. A leader writes only on condition that it still is the leader.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gcsafepoint.worker.config import COMMENTS, MAX_WRITE_BYTES, STATE_VARIABLES, VARIABLE_PREFIX, GCConfig
from gcsafepoint.worker.variables import BOUNDS, UNBOUND, Bounds, shown_size
from storage.model.errors import CorruptError

PREFIX = "/tidemark/default/gc/"
LEADER_UUID, LEADER_DESC, LEADER_LEASE, LAST_RUN_TIME, SAFE_POINT = (f"{PREFIX}{name}" for name in STATE_VARIABLES)
LEADER_ADDR = f"{PREFIX}leader_addr"
SAFE_POINT_TS = f"{PREFIX}safe_point_ts"  # exactly; the variable of mysql.tidb is cut to seconds
COLLECTED_TS = f"{PREFIX}collected_ts"  # the safepoint of the last round that did all its work
DO_GC = f"{PREFIX}do_gc"
PENDING, DONE = f"{PREFIX}delete_range/", f"{PREFIX}delete_range_done/"
ROUNDS = f"{PREFIX}round/"
MAX_WRITE_BYTES_KEY = f"{PREFIX}{MAX_WRITE_BYTES}"
RUNNING = "/tidb/server/minstartts/"
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

        Returns the new revision, 0 if nothing was written because an expectation failed. Durable when it returns.
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
    held = await _variables(records)
    known = {name: held[f"{PREFIX}{name}"] for name in _SETTINGS if f"{PREFIX}{name}" in held}
    config = GCConfig().updated({name: record.value for name, record in known.items()}, UNBOUND)
    revisions = {f"{PREFIX}{name}": known[name].revision if name in known else 0 for name in _SETTINGS}
    return Settings(config, revisions)


async def read_config(records: Records) -> GCConfig:
    """The configuration of `read_settings`; raises as it does."""
    return (await read_settings(records)).config


async def write_config(records: Records, variables: Mapping[str, str], bounds: Bounds = BOUNDS) -> GCConfig:
    """Set variables; returns all of them. In force from the next tick on, durable when it returns.

    Raises:
        GCConfigError: unknown names or bad values; nothing was set.
    """
    GCConfig().updated(variables, bounds)
    config = (await read_config(records)).updated(variables, bounds)
    stored = config.stored()
    await records.write({f"{PREFIX}{name}": stored[name] for name in variables}, {})
    return config


async def read_table(records: Records) -> list[tuple[str, str, str]]:
    """Name, value and comment of every variable, in the order of mysql.tidb; values as they stand, even bad ones."""
    held = await _variables(records)
    shown = GCConfig().variables() | {
        name: held[f"{PREFIX}{name}"].value for name in COMMENTS if f"{PREFIX}{name}" in held
    }
    if shown[MAX_WRITE_BYTES].isdecimal():
        shown[MAX_WRITE_BYTES] = shown_size(int(shown[MAX_WRITE_BYTES]))
    return [(name, shown.get(name, ""), comment) for name, comment in COMMENTS.items()]


async def _variables(records: Records) -> dict[str, Record]:
    return await records.read(f"{PREFIX}{VARIABLE_PREFIX}") | await records.read(MAX_WRITE_BYTES_KEY)


async def read_ts(records: Records, key: str) -> int:
    """The timestamp recorded at `key`, 0 if there is none.

    Raises:
        CorruptError: something else is there.
    """
    held = await records.read(key)
    text = held[key].value if key in held else "0"
    if not text.isdecimal():
        raise CorruptError(f"the record {key} holds {text!r} instead of a timestamp; correct it, or delete it")
    return int(text)


async def oldest_running(records: Records) -> tuple[int, str] | None:
    """The smallest start_ts of what TiDB servers report as running, and which server's; None if nothing runs.

    A server without transactions, or one that wrote something else, holds nothing back (TiDB's rule).
    """
    held = await records.read(RUNNING)
    running = [(record.value, key.removeprefix(RUNNING)) for key, record in held.items()]
    return min(((int(text), server) for text, server in running if text.isdecimal() and int(text)), default=None)
