"""Kills, stops and pauses the containers of a composition, one at a time, by a seed: what the
profile `chaos` of deploy/compose.yaml runs (docs/deploy/compose.md, *Chaos*).

A fault begins when every container is well, and ends with its container being started, or going on.
One that does not become healthy again ends the run with status 1. Each fault is one line of JSON.
SIGTERM ends a run early, with everything mended; so does the next run's start, if one was killed.
"""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from deploy.chaos.containers import Composition, Container, ContainersError
from deploy.chaos.timeline import KINDS, Fault, faults

HEALTHY_S = 300.0


class Chaos:
    """One run; `stopping` ends it."""

    def __init__(self, composition: Composition, services: Sequence[str]) -> None:
        """Of the composition's services those named; all, if none is."""
        self.stopping = threading.Event()
        self._composition = composition
        self._containers = {
            container.service: container
            for container in composition.containers()
            if not services or container.service in services
        }
        if missing := set(services) - self._containers.keys():
            raise ContainersError(
                f"no container with a health check for {', '.join(sorted(missing))} in "
                f"{composition.project}"
            )
        if not self._containers:
            raise ContainersError(f"{composition.project} has no containers with a health check")

    @property
    def services(self) -> list[str]:
        """Those that may have a fault."""
        return sorted(self._containers)

    def mend_all(self) -> None:
        """Have everything run, and wait until it is well."""
        for container in self._containers.values():
            self._composition.mend(container)
        for container in self._containers.values():
            self._composition.wait_healthy(container, HEALTHY_S)

    def carry_out(self, fault: Fault) -> None:
        """Wait for its time, do it, mend it, and wait until all is well; a stop is heeded while it
        waits.
        """
        if self.stopping.wait(fault.after_s):
            return
        container = self._containers[fault.service]
        say(fault=fault.kind, service=fault.service, seconds=fault.length_s)
        try:
            self._composition.break_(container, fault.kind)
            self.stopping.wait(fault.length_s)
        finally:
            self._composition.mend(container)
        if not self.stopping.is_set():
            began_s = time.monotonic()
            self._wait_healthy(container)
            say(healthy=fault.service, after_seconds=round(time.monotonic() - began_s, 1))

    def _wait_healthy(self, broken: Container) -> None:
        self._composition.wait_healthy(broken, HEALTHY_S)
        # Another one may have ended meanwhile, as by what this one did: one fault at a time.
        for container in self._containers.values():
            self._composition.wait_healthy(container, HEALTHY_S)


def say(**facts: Any) -> None:
    """One line of JSON."""
    print(json.dumps(facts), flush=True)  # noqa: T201 - read by `docker compose logs`


def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--rounds", type=int, default=0, help="end when each has had so many faults; 0: no such end"
    )
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--kinds", default=",".join(KINDS), help="by commas")
    parser.add_argument("--services", default="", help="by commas; all with a health check if not")
    parser.add_argument("--project", default="", help="of docker compose; default: its own")
    parser.add_argument("--socket", default="/var/run/docker.sock")
    arguments = parser.parse_args(argv)
    kinds = [kind for kind in arguments.kinds.split(",") if kind]
    if not kinds or set(kinds) - set(KINDS):
        parser.error(f"--kinds is made of {', '.join(KINDS)}, not {arguments.kinds!r}")
    if arguments.every <= 0 or arguments.minutes <= 0 or arguments.rounds < 0:
        parser.error("--every and --minutes are above 0, --rounds is not below")
    try:
        return run(arguments, kinds)
    except ContainersError as err:
        print(f"chaos: {err}", file=sys.stderr)  # noqa: T201
        return 1


def run(arguments: argparse.Namespace, kinds: Sequence[str]) -> int:
    """Faults until the time is over; raises ContainersError."""
    composition = Composition(arguments.socket, arguments.project)
    chaos = Chaos(composition, [name for name in arguments.services.split(",") if name])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: chaos.stopping.set())
    say(seed=arguments.seed, project=composition.project, services=chaos.services, kinds=kinds)
    chaos.mend_all()
    deadline, count = time.monotonic() + arguments.minutes * 60, 0
    every_fault = faults(arguments.seed, chaos.services, kinds, arguments.every)
    if arguments.rounds:
        every_fault = islice(every_fault, arguments.rounds * len(chaos.services))
    for fault in every_fault:
        if chaos.stopping.is_set() or time.monotonic() + fault.after_s > deadline:
            break
        chaos.carry_out(fault)
        count += 1
    say(finished=True, faults=count)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
