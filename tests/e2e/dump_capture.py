"""The capture of the dump matrix: alive all the time, but for its deaths;
and the calls that steer dumps.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from tidemarkpb.v1 import changefeed_pb2, dump_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from tests.integration.capture.processes import LOOPBACK
from tests.ports import free_port

_START_S, _CALL_S = 120.0, 60.0
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
Death = tuple[str, int]
"""A step and which one of it; of `any` in how many milliseconds."""


class Capture:
    """Starts captures one after the other; each is armed with the next planned death."""

    def __init__(self, directory: Path, coordinator: str, chunk_rows: int = 100) -> None:
        self.killed: Counter[str] = Counter()
        self.life = 0
        self._directory = directory
        self._coordinator = coordinator
        self._chunk_rows = chunk_rows
        self._plan = directory / "plan"
        self._plan.write_text("never 0", encoding="ascii")
        self._deaths: list[Death] = []
        self._pid = 0
        self._timer: threading.Timer | None = None
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._endpoints = {name: f"127.0.0.1:{free_port()}" for name in ("capture", "flight")}
        self._up = threading.Event()
        self._ending = False
        with (directory / "capture.log").open("ab") as log:
            self._forker = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.dump_points", str(self._plan)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._start()
        self._watch.start()
        self.wait_up()

    def close(self) -> None:
        """Kill it for good."""
        self._ending = True
        self.disarm()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(_START_S)
        self._watch.join(_START_S)

    @property
    def flight(self) -> str:
        """Its Flight address, always the same."""
        return self._endpoints["flight"]

    def wait_up(self) -> None:
        """Wait until it serves."""
        if not self._up.wait(_START_S):
            raise TimeoutError(f"no capture after {_START_S} s; see {self._directory}/capture.log")

    def arm(self, deaths: Sequence[Death]) -> None:
        """It dies so, then the one after it so, and so on; then no more."""
        self._deaths = list(deaths)
        self._next_death()

    def disarm(self) -> None:
        """No more deaths."""
        self._deaths = []
        self._next_death()

    def dump(self, verb: str, changefeed: str, **options: Any) -> Any:
        """`Start`, `Pause`, `Resume`, `Restart` or `GetDumpStatus`;
        asked again while no capture answers.
        """
        name = verb if verb == "GetDumpStatus" else f"{verb}Dump"
        request = getattr(dump_pb2, f"{name}Request")(changefeed_id=changefeed, **options)
        return self._call(DumpServiceStub, name, request)

    def changefeed(self, verb: str, **options: Any) -> Any:
        """`Create`, `Query` or `Remove`."""
        name = f"{verb}Changefeed"
        return self._call(
            ChangefeedServiceStub, name, getattr(changefeed_pb2, f"{name}Request")(**options)
        )

    def _call(self, stub: Any, method: str, request: Any) -> Any:
        deadline = time.monotonic() + _START_S
        while True:
            self.check()
            self.wait_up()
            try:
                local = [("grpc.use_local_subchannel_pool", 1)]
                with grpc.insecure_channel(self._endpoints["capture"], options=local) as channel:
                    return getattr(stub(channel), method)(request, timeout=_CALL_S)
            except grpc.RpcError as err:
                if err.code() not in _LATER or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _start(self) -> None:
        addresses = [
            "--addr",
            self._endpoints["capture"],
            "--flight-addr",
            self._endpoints["flight"],
        ]
        flags = [*addresses, "--http-addr", LOOPBACK, "--coordinator", self._coordinator]
        flags += ["--data-dir", str(self._directory / "capture")]
        assert self._forker.stdin is not None
        self._forker.stdin.write(
            json.dumps({"flags": flags, "chunk_rows": self._chunk_rows}) + "\n"
        )
        self._forker.stdin.flush()

    def _look(self) -> None:
        """Follow what the captures say."""
        assert self._forker.stdout is not None
        for line in self._forker.stdout:
            said = json.loads(line)
            if "pid" in said:
                self._pid, self.life = said["pid"], self.life + 1
            elif "endpoints" in said:
                self._endpoints |= {name: said["endpoints"][name] for name in self._endpoints}
                self._up.set()
            elif not self._ending:
                self._up.clear()
                self._bury(said["ended"])
                self._start()

    def check(self) -> None:
        """Raise if a capture ended other than by its planned death."""
        odd = [step for step in self.killed if step.startswith("ended")]
        if odd:
            raise RuntimeError(f"a capture {odd[0]} by itself; see {self._directory}/capture.log")

    def _bury(self, status: int) -> None:
        step = self._plan.read_text(encoding="ascii").removeprefix("died ").partition(" ")[0]
        self.killed[step if status == -signal.SIGKILL else f"ended {status}"] += 1
        self._next_death()

    def _next_death(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        step, count = self._deaths.pop(0) if self._deaths else ("never", 0)
        self._plan.write_text(f"{step} {count}", encoding="ascii")
        if step == "any":
            self._timer = threading.Timer(count / 1000, self._kill)
            self._timer.start()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
