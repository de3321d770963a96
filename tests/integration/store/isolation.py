"""What snapshot isolation demands of a finished history:
a pure checker over what clients saw and the store kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class End(Enum):
    """What a client knows of its transaction's end."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"  # it died


@dataclass(slots=True)
class Txn:
    """One transaction as its client saw it; `locked_reads` are the values its pessimistic locks
    gave it.
    """

    start_ts: int
    reads: dict[bytes, int] = field(default_factory=dict)
    locked_reads: dict[bytes, int] = field(default_factory=dict)
    writes: dict[bytes, int] = field(default_factory=dict)
    commit_ts: int = 0
    end: End = End.UNKNOWN


@dataclass(frozen=True, slots=True)
class Version:
    """One committed version of a key."""

    commit_ts: int
    start_ts: int
    value: int


History = Mapping[bytes, Sequence[Version]]
"""Versions by key, oldest first."""


def faults(history: History, txns: Sequence[Txn]) -> list[str]:
    """All that contradicts snapshot isolation; empty when nothing does."""
    found: list[str] = []
    for txn in txns:
        found += (
            _atomicity(history, txn) + _snapshot_reads(history, txn) + _lost_updates(history, txn)
        )
    for key, versions in history.items():
        stamps = [version.commit_ts for version in versions]
        if len(set(stamps)) < len(stamps):
            found.append(f"two versions of {key.hex()} at one commit_ts")
    return found


def total_at(history: History, ts: int) -> int:
    """The sum over all keys as of `ts`."""
    return sum(_value(versions, ts) for versions in history.values())


def _atomicity(history: History, txn: Txn) -> list[str]:
    """All writes at one commit_ts, the one the client was told, or none if it was told so."""
    kept = {
        (key, version.commit_ts, version.value)
        for key, versions in history.items()
        for version in versions
        if version.start_ts == txn.start_ts
    }
    stamps = {commit_ts for _, commit_ts, _ in kept}
    if {(key, value) for key, _, value in kept} != (
        set(txn.writes.items()) if kept else set()
    ) or len(stamps) > 1:
        return [f"{txn.start_ts} is torn: {len(kept)} of {len(txn.writes)} writes at {stamps}"]
    if txn.end is End.COMMITTED and stamps != ({txn.commit_ts} if txn.writes else set()):
        return [f"{txn.start_ts} was told {txn.commit_ts}, but is committed at {stamps}"]
    return (
        [f"{txn.start_ts} failed, but is committed at {stamps}"]
        if txn.end is End.FAILED and stamps
        else []
    )


def _snapshot_reads(history: History, txn: Txn) -> list[str]:
    return [
        f"{txn.start_ts} read {value} of {key.hex()}, not {_value(history[key], txn.start_ts)}"
        for key, value in txn.reads.items()
        if _value(history[key], txn.start_ts) != value
    ]


def _lost_updates(history: History, txn: Txn) -> list[str]:
    """Nobody committed to a key that a committed transaction read and then wrote,
    between the two.
    """
    kept = {
        version.commit_ts
        for versions in history.values()
        for version in versions
        if _is_of(version, txn)
    }
    if not kept:
        return []
    (commit_ts,) = kept
    found = [
        f"{txn.start_ts} locked {value} of {key.hex()}, not {_value(history[key], commit_ts - 1)}"
        for key, value in txn.locked_reads.items()
        if _value(history[key], commit_ts - 1) != value
    ]
    for key in txn.writes.keys() & txn.reads.keys() - txn.locked_reads.keys():
        between = [
            version for version in history[key] if txn.start_ts < version.commit_ts < commit_ts
        ]
        found += [
            f"{txn.start_ts} overwrote {version.start_ts} on {key.hex()}" for version in between
        ]
    return found


def _is_of(version: Version, txn: Txn) -> bool:
    return version.start_ts == txn.start_ts


def _value(versions: Sequence[Version], ts: int) -> int:
    return next((version.value for version in reversed(versions) if version.commit_ts <= ts), 0)
