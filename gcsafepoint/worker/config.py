"""The variables of mysql.tidb that steer GC: names, defaults, meaning (pure).

Source: TiDB 3.0's GC configuration; `gc.max-write-bytes-per-sec` is TiKV's. Durations are Go duration strings; they are
read anew at every round.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gcsafepoint.worker import variables as read
from gcsafepoint.worker.times import DurationError
from gcsafepoint.worker.variables import BOUNDS, CENTRAL, DISTRIBUTED, Bounds, GCConfigError

VARIABLE_PREFIX: Final = "tikv_gc_"
MAX_WRITE_BYTES: Final = "gc.max-write-bytes-per-sec"
STATE_VARIABLES: Final = (
    "tikv_gc_leader_uuid",
    "tikv_gc_leader_desc",
    "tikv_gc_leader_lease",
    "tikv_gc_last_run_time",
    "tikv_gc_safe_point",
)
COMMENTS: Final = {
    "tikv_gc_leader_uuid": "who is GC leader; kept by the workers, not for setting",
    "tikv_gc_leader_desc": "host, process and start of the GC leader; not for setting",
    "tikv_gc_leader_lease": "until when the GC leader leads unless it renews; not for setting",
    "tikv_gc_enable": "whether rounds run at all",
    "tikv_gc_run_interval": "from the start of one round to the start of the next; a Go duration, at least 10m",
    "tikv_gc_life_time": "how long old versions are kept; a Go duration, at least 10m",
    "tikv_gc_last_run_time": "when the last round began; not for setting",
    "tikv_gc_safe_point": "snapshots from here on can be read; not for setting",
    "tikv_gc_auto_concurrency": "take the number of stores as the concurrency",
    "tikv_gc_mode": f"who drives Do GC: each store ({DISTRIBUTED}), or the GC leader ({CENTRAL}, legacy)",
    "tikv_gc_concurrency": "stores worked on at a time when that is not automatic; 1 to 128",
    MAX_WRITE_BYTES: "bytes a second that Do GC may write at each store; 0: no limit",
}
"""What each variable is for, in the order they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GCConfig:
    """What an operator may set."""

    enable: bool = True
    """Whether rounds run at all."""
    run_interval_ms: int = 600_000
    """From the start of one round to the start of the next."""
    life_time_ms: int = 600_000
    """How long overwritten versions are kept."""
    mode: str = DISTRIBUTED
    """Who drives Do GC: each store by itself, or this worker region by region."""
    auto_concurrency: bool = True
    """Take the number of stores as the concurrency."""
    concurrency: int = 2
    """Stores worked on at a time when it is not automatic; never more than one worker a store."""
    max_write_bytes_per_s: int = 0
    """What Do GC may write at each store, for the stores to read; 0: no limit."""

    def variables(self) -> dict[str, str]:
        """The values as mysql.tidb shows them."""
        return {
            "tikv_gc_enable": str(self.enable).lower(),
            "tikv_gc_run_interval": read.shown(self.run_interval_ms),
            "tikv_gc_life_time": read.shown(self.life_time_ms),
            "tikv_gc_mode": self.mode,
            "tikv_gc_auto_concurrency": str(self.auto_concurrency).lower(),
            "tikv_gc_concurrency": str(self.concurrency),
            MAX_WRITE_BYTES: read.shown_size(self.max_write_bytes_per_s),
        }

    def stored(self) -> dict[str, str]:
        """The values as the metadata store keeps them: as shown, but sizes in plain bytes, for whoever reads them."""
        return self.variables() | {MAX_WRITE_BYTES: str(self.max_write_bytes_per_s)}

    def updated(self, variables: Mapping[str, str], bounds: Bounds = BOUNDS) -> "GCConfig":
        """This configuration with `variables` set.

        Raises:
            GCConfigError: unknown names (with the nearest known one), state that is not for setting, bad values.
        """
        faults: list[str] = []
        values: dict[str, Any] = {}
        for name, text in variables.items():
            try:
                field, parse = _field(name, bounds)
                values[field] = parse(text)
            except (GCConfigError, DurationError) as err:
                faults.append(f"{name[:40]}: {err.message}")
        if faults:
            raise GCConfigError("; ".join(faults))
        return replace(self, **values)

    def workers(self, stores: int) -> int:
        """How many stores are worked on at a time."""
        return stores if self.auto_concurrency else min(self.concurrency, stores)


def _field(name: str, bounds: Bounds) -> tuple[str, Callable[[str], Any]]:
    if name in STATE_VARIABLES:
        raise GCConfigError("this is the worker's own record and not for setting")
    fields: dict[str, tuple[str, Callable[[str], Any]]] = {
        "tikv_gc_enable": ("enable", read.boolean),
        "tikv_gc_run_interval": ("run_interval_ms", bounds.milliseconds),
        "tikv_gc_life_time": ("life_time_ms", bounds.milliseconds),
        "tikv_gc_mode": ("mode", read.mode),
        "tikv_gc_auto_concurrency": ("auto_concurrency", read.boolean),
        "tikv_gc_concurrency": ("concurrency", read.concurrency),
        MAX_WRITE_BYTES: ("max_write_bytes_per_s", read.size_bytes),
    }
    if name not in fields:
        raise GCConfigError(f"no such variable, did you mean {nearest(name, fields)}?")
    return fields[name]


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
