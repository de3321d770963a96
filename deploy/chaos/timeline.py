"""Which container has which fault, in which order and for how long: all of it from a seed. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

LENGTHS_S: Final = {
    "kill": (0.0, 5.0),  # kill -9, and started again after so long
    "stop": (0.0, 10.0),  # SIGTERM, which daemons answer by draining
    # Leases of coordinators last 3 s, those of captures 10 s: some pauses outlast both.
    "pause": (1.0, 20.0),
}
KINDS: Final = tuple(LENGTHS_S)


@dataclass(frozen=True)
class Fault:
    """One fault of one service; begins `after_s` seconds after all services were well."""

    after_s: float
    kind: str
    service: str
    length_s: float


def faults(
    seed: int, services: Sequence[str], kinds: Sequence[str], every_s: float
) -> Iterator[Fault]:
    """Faults without end, one after the other, `every_s` seconds between two on average.

    They come in rounds, in each of which every service has one. The same seed, services and kinds
    give the same faults.
    """
    dice = random.Random(seed)  # noqa: S311 - the same for the same seed
    while True:
        for service in dice.sample(sorted(services), len(services)):
            kind = dice.choice(kinds)
            yield Fault(
                after_s=round(dice.expovariate(1 / every_s), 1),
                kind=kind,
                service=service,
                length_s=round(dice.uniform(*LENGTHS_S[kind]), 1),
            )
