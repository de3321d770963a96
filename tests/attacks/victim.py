"""Another client: `python -m tests.attacks.victim HOST:PORT METHOD PID` calls until stdin ends.

Each connection makes a few calls, so that clients that were there before and new ones take turns. A
call counts from its first attempt until it is answered, whatever refused it in between. `worst_s`
is without the time for which this process, and the thread of the daemon with that pid that waited
most, were ready to run and had no core: that is the machine's doing, and the test's own load is on
the same machine; `worst_wall_s` has it. Prints one JSON line.
"""

import json
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.attacks.peer import Peer

_PAUSE_S = 0.02
_FRESH_EVERY = 5
_ATTEMPT_S = 10.0


def main() -> None:
    address, method, pid = sys.argv[1:]
    host, _, port = address.rpartition(":")
    target: Any = SimpleNamespace(host_and_port=(host, int(port)), authority=None)
    latencies: list[float] = []
    wall: list[float] = []
    peer: Peer | None = None
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        if peer is not None and len(latencies) % _FRESH_EVERY == 0:
            peer.close()
            peer = None
        waited_s = _waited_for_cores_s(pid)
        began_s = time.monotonic()
        peer = _answered(target, peer, method)
        wall.append(time.monotonic() - began_s)
        latencies.append(max(0.0, wall[-1] - _starved_s(waited_s, _waited_for_cores_s(pid))))
        if len(latencies) == 1:
            print("ready", flush=True)
    worst_s, worst_wall_s = (max(ones[1:], default=0.0) for ones in (latencies, wall))
    print(
        json.dumps({"worst_s": worst_s, "worst_wall_s": worst_wall_s, "calls": len(latencies) - 1})
    )


def _waited_for_cores_s(pid: str) -> dict[str, float]:
    """For how long this process (`own`) and each thread of the daemon were ready to run;
    nothing if nobody counts.
    """
    paths = {path.parent.name: path for path in Path(f"/proc/{pid}/task").glob("*/schedstat")}
    waited: dict[str, float] = {}
    for name, path in {"own": Path("/proc/self/schedstat"), **paths}.items():
        with suppress(OSError):
            waited[name] = int(path.read_text().split()[1]) / 1e9
    return waited


def _starved_s(before: dict[str, float], after: dict[str, float]) -> float:
    """What of the time in between had no core: of this process,
    and of the daemon's thread that had the most of it.
    """
    grown = {name: after[name] - before[name] for name in after.keys() & before.keys()}
    return grown.pop("own", 0.0) + max(grown.values(), default=0.0)


def _answered(target: Any, peer: Peer | None, method: str) -> Peer:
    while True:
        try:
            peer = peer or Peer(target, seconds=_ATTEMPT_S).introduce()
            status = peer.call(method)
        except OSError:
            status = "no connection"
        if status in ("0", "2") and peer is not None:
            return peer
        if peer is not None:
            peer.close()
            peer = None
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
