"""Carries out a timeline: each fault in a thread of its own, from its beginning to its end."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence

from tests.e2e.chaos.cluster import World
from tests.e2e.chaos.nodes import Node
from tests.e2e.chaos.timeline import Fault


class Faults:
    """Those of one run."""

    def __init__(self, world: World, timeline: Sequence[Fault]) -> None:
        self._world = world
        self._timeline = timeline
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        """Returns when the last one is over. Raises what a fault could not do."""
        began_s = time.monotonic()
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._one, args=(fault, began_s, errors), daemon=True)
            for fault in self._timeline
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _one(self, fault: Fault, began_s: float, errors: list[BaseException]) -> None:
        try:
            _wait_until(began_s + fault.at_s)
            nodes = self._world.named(fault.node)
            getattr(self, f"_{fault.kind}")(fault, nodes, began_s + fault.end_s)
            self.done[fault.kind] += 1
        except BaseException as err:  # noqa: BLE001 - told by `run`
            errors.append(err)

    def _kill(self, fault: Fault, nodes: Sequence[Node], until_s: float) -> None:
        for node in nodes:
            node.hold_down(fault)
        _wait_until(until_s)
        for node in nodes:
            node.release(fault)

    _outage = _kill

    def _stop(self, fault: Fault, nodes: Sequence[Node], until_s: float) -> None:
        [node] = nodes
        del fault
        node.send(signal.SIGSTOP)
        _wait_until(until_s)
        node.send(signal.SIGCONT)

    def _net(self, fault: Fault, nodes: Sequence[Node], until_s: float) -> None:
        [node] = nodes
        peers = [self._world.nodes[name].room for name in fault.peers]
        if fault.way == "cut":
            node.room.cut()
        elif fault.way == "slow":
            node.room.slow()
        for peer in peers:
            node.room.stop_sending_to(peer)
            if fault.way == "partition":
                peer.stop_sending_to(node.room)
        _wait_until(until_s)
        if not peers:
            node.room.mend()
        for peer in peers:
            node.room.send_to(peer)
            if fault.way == "partition":
                peer.send_to(node.room)

    def _disk(self, fault: Fault, nodes: Sequence[Node], until_s: float) -> None:
        [node] = nodes
        del fault
        assert node.disk is not None
        node.disk.fill()
        _wait_until(until_s)
        node.disk.free()

    def _clock(self, fault: Fault, nodes: Sequence[Node], until_s: float) -> None:
        [node] = nodes
        assert node.clock is not None
        node.clock.set(fault.offset_s)
        _wait_until(until_s)
        node.clock.set(0.0)


def _wait_until(at_s: float) -> None:
    while (left_s := at_s - time.monotonic()) > 0:
        time.sleep(left_s)
