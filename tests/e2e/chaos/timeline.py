"""Which fault happens when, and to whom: all of it follows from a seed. Pure.

A node has at most one fault at a time, apart from its clock; several nodes may have one together.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("kill", "outage", "stop", "net", "disk", "clock")
LENGTHS_S = {
    "kill": (0.1, 4.0),
    "outage": (0.1, 6.0),
    # Leases of coordinators last 3 s, those of captures 10 s: some stops are longer than both.
    "stop": (0.5, 16.0),
    "net": (1.0, 16.0),
    "disk": (3.0, 12.0),
    "clock": (4.0, 20.0),
}
NET_WAYS = ("cut", "partition", "one-way", "slow")
CLOCK_MAX_S = 40.0
CLOCK_FAR_S, CLOCK_FAR_SHARE = 1500.0, 0.3
"""Some jumps go beyond what a source accepts: `max-clock-skew` is ten minutes."""
_FIRST_S = 2.0
_PAUSE_MIN_S = 0.3


@dataclass(frozen=True)
class Fault:
    """One fault: from `at_s` on, counted from the start of the workload, for `length_s`."""

    at_s: float
    kind: str
    node: str
    """Of `outage`: a kind of nodes, all of which are killed; or `all`."""
    length_s: float
    way: str = ""
    """Of `net`: one of NET_WAYS."""
    peers: tuple[str, ...] = ()
    """Of a partition: the nodes on the other side."""
    offset_s: float = 0.0
    """Of `clock`: how far it jumps; it jumps back when the fault ends."""

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.at_s + self.length_s

    def __str__(self) -> str:
        """One line for people."""
        more = " ".join(filter(None, (self.way, ",".join(self.peers))))
        clock = f"{self.offset_s:+.1f} s" if self.kind == "clock" else ""
        return f"{self.at_s:7.1f} s {self.kind:5} {self.node} {self.length_s:.1f} s {more}{clock}"


def timeline(
    dice: random.Random, victims: Mapping[str, Sequence[str]], span_s: float, every_s: float
) -> list[Fault]:
    """Faults of the kinds in `victims`, each of which names the nodes that may have it (one that is
    there twice, twice as often), about every `every_s` seconds; all are over at `span_s`.
    """
    kinds = [kind for kind in KINDS if victims.get(kind)]
    busy_until: dict[tuple[str, bool], float] = {}
    faults: list[Fault] = []
    for at_s in _times(dice, span_s, every_s):
        kind = dice.choice(kinds)
        node = dice.choice(victims[kind])
        length_s = min(dice.uniform(*LENGTHS_S[kind]), span_s - at_s)
        # Drawn whether or not the fault can be: what comes later does not hang on it.
        details = _details(dice, kind, sorted({*victims[kind]} - {node}))
        place = (node, kind == "clock")
        if busy_until.get(place, 0.0) <= at_s:
            fault = Fault(round(at_s, 2), kind, node, round(length_s, 2), *details)
            busy_until[place] = fault.end_s + _PAUSE_MIN_S
            faults.append(fault)
    return faults


def _times(dice: random.Random, span_s: float, every_s: float) -> Iterator[float]:
    at_s = _FIRST_S
    while at_s < span_s - 1:
        yield at_s
        at_s += max(_PAUSE_MIN_S, dice.expovariate(1 / every_s))


def _details(
    dice: random.Random, kind: str, others: Sequence[str]
) -> tuple[str, tuple[str, ...], float]:
    if kind == "net":
        way = dice.choice(NET_WAYS)
        peers = dice.sample(others, dice.randint(1, max(1, len(others) - 1))) if others else []
        return way, tuple(sorted(peers)) if way in ("partition", "one-way") else (), 0.0
    if kind == "clock":
        most_s = CLOCK_FAR_S if dice.random() < CLOCK_FAR_SHARE else CLOCK_MAX_S
        return "", (), round(dice.uniform(-most_s, most_s), 1)
    return "", (), 0.0
