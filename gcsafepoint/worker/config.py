"""The variables of mysql.tidb that steer GC: names, defaults, meaning, and why a value is refused (pure).

Source: TiDB 3.0's GC configuration. Durations are Go duration strings; they are read anew at every round.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gcsafepoint.worker.times import DurationError, format_duration_ns, parse_duration_ns
from storage.model.errors import InvalidError

DISTRIBUTED: Final = "distributed"
CENTRAL: Final = "central"
PREFIX: Final = "tikv_gc_"
STATE_VARIABLES: Final = (
    "tikv_gc_leader_uuid",
    "tikv_gc_leader_desc",
    "tikv_gc_leader_lease",
    "tikv_gc_last_run_time",
    "tikv_gc_safe_point",
)
_MAX_CONCURRENCY = 128
_MS_NS = 10**6


class GCConfigError(InvalidError):
    """GC cannot be configured so; the message lists every fault."""

    code = "ErrGCConfig"


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
    """Regions worked on at a time, at most one a store, when it is not automatic."""

    def variables(self) -> dict[str, str]:
        """The values as mysql.tidb shows them."""
        return {
            "tikv_gc_enable": str(self.enable).lower(),
            "tikv_gc_run_interval": format_duration_ns(self.run_interval_ms * _MS_NS),
            "tikv_gc_life_time": format_duration_ns(self.life_time_ms * _MS_NS),
            "tikv_gc_mode": self.mode,
            "tikv_gc_auto_concurrency": str(self.auto_concurrency).lower(),
            "tikv_gc_concurrency": str(self.concurrency),
        }

    def updated(self, variables: Mapping[str, str]) -> "GCConfig":
        """This configuration with `variables` set.

        Raises:
            GCConfigError: unknown names (with the nearest known one), state that is not for setting, bad values.
        """
        faults: list[str] = []
        values: dict[str, Any] = {}
        for name, text in variables.items():
            try:
                field, parse = _field(name)
                values[field] = parse(text)
            except (GCConfigError, DurationError) as err:
                faults.append(f"{name}: {err.message}")
        if faults:
            raise GCConfigError("; ".join(faults))
        return replace(self, **values)

    def workers(self, stores: int) -> int:
        """How many stores are worked on at a time."""
        return stores if self.auto_concurrency else min(self.concurrency, stores)


def _field(name: str) -> tuple[str, Callable[[str], Any]]:
    if name in STATE_VARIABLES:
        raise GCConfigError("this is the worker's own record and not for setting")
    if name not in _FIELDS:
        near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.0)[0]
        raise GCConfigError(f"no such variable, did you mean {near}?")
    return _FIELDS[name]


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise GCConfigError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def _milliseconds(text: str) -> int:
    duration_ms = parse_duration_ns(text) // _MS_NS
    if duration_ms < 1:
        raise GCConfigError(f"{text!r} is too short; the least is 1ms")
    return duration_ms


def _mode(text: str) -> str:
    if text.lower() not in (DISTRIBUTED, CENTRAL):
        raise GCConfigError(f"{text!r} is neither {DISTRIBUTED} nor {CENTRAL}")
    return text.lower()


def _concurrency(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_CONCURRENCY:
        raise GCConfigError(f"{text!r} is not a number from 1 to {_MAX_CONCURRENCY}")
    return int(text)


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tikv_gc_enable": ("enable", _boolean),
    "tikv_gc_run_interval": ("run_interval_ms", _milliseconds),
    "tikv_gc_life_time": ("life_time_ms", _milliseconds),
    "tikv_gc_mode": ("mode", _mode),
    "tikv_gc_auto_concurrency": ("auto_concurrency", _boolean),
    "tikv_gc_concurrency": ("concurrency", _concurrency),
}
