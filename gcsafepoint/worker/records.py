"""What outlives a worker, in the metadata store: variables, leader, safepoint, ranges to destroy.

Keys: `/tidemark/default/gc/<variable of mysql.tidb>`, `…/gc/delete_range/<job>/<element>` and
`…/gc/delete_range_done/<job>/<element>`. A leader writes only on condition that it still is the leader.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gcsafepoint.worker.config import STATE_VARIABLES, GCConfig

PREFIX = "/tidemark/default/gc/"
LEADER_UUID, LEADER_DESC, LEADER_LEASE, LAST_RUN_TIME, SAFE_POINT = (f"{PREFIX}{name}" for name in STATE_VARIABLES)
SAFE_POINT_TS = f"{PREFIX}safe_point_ts"  # exactly; the variable of mysql.tidb is cut to seconds
PENDING, DONE = f"{PREFIX}delete_range/", f"{PREFIX}delete_range_done/"
RUNNING = "/tidb/server/minstartts/"


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


async def read_config(records: Records) -> GCConfig:
    """The variables in force; those that were never set have their defaults.

    Raises:
        GCConfigError: somebody wrote a value that cannot be used.
    """
    held = await records.read(f"{PREFIX}tikv_gc_")
    variables = {key.removeprefix(PREFIX): record.value for key, record in held.items()}
    return GCConfig().updated({name: text for name, text in variables.items() if name not in STATE_VARIABLES})


async def write_config(records: Records, variables: Mapping[str, str]) -> GCConfig:
    """Set variables; returns all of them. In force from the next tick on, durable when it returns.

    Raises:
        GCConfigError: unknown names or bad values; nothing was set.
    """
    config = (await read_config(records)).updated(variables)
    shown = config.variables()
    await records.write({f"{PREFIX}{name}": shown[name] for name in variables}, {})
    return config


async def oldest_running_ts(records: Records) -> int | None:
    """The smallest start_ts of what TiDB servers report as running, in `/tidb/server/minstartts/<id>`."""
    held = await records.read(RUNNING)
    return min((int(record.value) for record in held.values() if record.value.isdecimal()), default=None)
