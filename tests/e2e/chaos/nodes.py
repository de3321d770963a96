"""The processes of a run: each is one node, with a room, a clock and often a disk of its own. A
node that ends is started again, as systemd or Kubernetes would, unless a fault holds it down.
"""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.chaos.clocks import Clock
from tests.e2e.chaos.rooms import Disk, Room
from tests.integration.coordinator.processes import ENVIRONMENT, Daemon

_LOOK_S = 0.2
_AGAIN_S = 1.0


class Node(Daemon):
    """One process with all of its children, started with the same command each time."""

    def __init__(self, name: str, room: Room, log: Path, clock: Clock | None = None) -> None:
        variables = clock.environment if clock else {}
        prefix = [*room.inside, "env", *(f"{key}={value}" for key, value in variables.items())]
        super().__init__((), log, prefix)
        self.name = name
        self.room = room
        self.clock = clock
        self.disk: Disk | None = None
        self._holds: set[object] = set()

    def set_command(self, command: Sequence[str]) -> None:
        """What it runs."""
        self._command = [*self._command, *command]

    def launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def send(self, number: signal.Signals) -> None:
        """To all of its processes."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    @property
    def held_down(self) -> bool:
        """Whether a fault wants it dead."""
        return bool(self._holds)

    def hold_down(self, fault: object) -> None:
        """Kill it, and have it stay dead until this fault releases it."""
        self._holds.add(fault)
        self.kill()

    def release(self, fault: object) -> None:
        """See `hold_down`."""
        self._holds.discard(fault)

    @property
    def kind(self) -> str:
        """Its name without a number, or what it is the job of."""
        return self.name.rstrip("0123456789").partition("-")[0]

    def status(self) -> int | None:
        """Its exit status, when it has ended."""
        return None if self._process is None else self._process.poll()


class Supervisor:
    """Starts nodes again that have ended."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.ended: Counter[str] = Counter()
        """Nodes that ended other than by a fault of ours, with their status."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, node: Node) -> Node:
        """Take care of it from now on."""
        self.nodes[node.name] = node
        return node

    def begin(self) -> None:
        """All that are to run were started once."""
        self._thread.start()

    def end(self) -> None:
        """Kill all, and start none again."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for node in list(self.nodes.values()):
            node.kill()

    def _run(self) -> None:
        again_s: dict[str, float] = {}
        while not self._ending.wait(_LOOK_S):
            for node in list(self.nodes.values()):
                status = node.status()
                if status is None or node.held_down:
                    again_s.pop(node.name, None)
                elif node.name not in again_s:
                    if status != -signal.SIGKILL:
                        self.ended[f"{node.name} {status}"] += 1
                    again_s[node.name] = time.monotonic() + _AGAIN_S
                elif time.monotonic() >= again_s[node.name]:
                    del again_s[node.name]
                    node.launch()
