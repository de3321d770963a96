"""Captures with a death planned at a step of a chunk:
`python -m tests.e2e.dump_points PLAN`, started by `dump_matrix`.

The process imports what a capture needs, then forks one capture for each line of its standard
input, `{"flags": […], "chunk_rows": N}`, and says on standard output what its captures say when
they are ready, and how they ended. A capture looks into the file PLAN, `STEP COUNT`, at each step:
at the COUNT-th one of that name it writes `died STEP` there and kills itself (SIGKILL). Steps `x-`
and `x+` are right before and right after something:

    low, high      a watermark is written           select       a chunk is read
    passed         the log passed a high watermark  added        rows of chunks are in the sorter
    resolved       readers may have them            progress     cursors are made durable
    checkpoint     the checkpoint is made durable   schema       a DDL is made durable
    taken          a job was taken up, or taken up anew
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.capture.catalog import FeedCatalog
from server.capture.config import CaptureConfig
from server.capture.daemon import open_capture
from server.capture.records import Records
from server.capture.worker.pool import REGISTRY
from server.cli.daemon import run_daemon
from server.daemon import HttpPort
from server.dump.job import DumpRecords
from server.dump.mysql.chunk import ChunkSize
from server.dump.mysql.listener import DumpListener
from server.dump.mysql.reader import ChunkReader, Server
from server.dump.mysql.window import HIGH
from server.puller.mysql.puller import LogPuller
from server.puller.mysql.rows import LogRows

STEPS = (
    *("low-", "low+", "select-", "select+", "high-", "high+", "passed", "added", "resolved"),
    *("progress-", "progress+", "checkpoint-", "checkpoint+", "schema-", "schema+", "taken"),
)
_PARENT_DIED = 1  # PR_SET_PDEATHSIG
At = Callable[..., str]
"""The step that a call is, by its arguments; empty: none."""


class Death:
    """Ends this process at a step."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan
        self._armed = ""
        self._seen = 0
        self._fresh = False
        """Rows of a chunk were added, and not resolved yet."""

    def plan(self) -> None:
        """Put itself into the way of the dump."""
        self._around(Server, "write", lambda _, uuid, kind: "high" if kind == HIGH else "low")
        self._around(ChunkReader, "read", lambda *_, **__: "select")
        self._around(DumpListener, "watermark", self._passed, after_only=True)
        self._around(DumpListener, "begin_job", lambda *_: "taken", after_only=True)
        self._around(LogRows, "_put", self._added, after_only=True)
        self._around(LogPuller, "_resolve", self._resolved, after_only=True)
        self._around_async(DumpRecords, "put_tables", lambda *_: "progress")
        self._around_async(
            Records, "save", lambda _, checkpoints, *__: "checkpoint" if checkpoints else ""
        )
        self._around_async(FeedCatalog, "change", lambda *_: "schema")

    def at(self, step: str) -> None:
        """Die, if it is now."""
        armed = self._plan.read_text(encoding="ascii")
        if armed != self._armed:
            self._armed, self._seen = armed, 0
        name, _, count = armed.partition(" ")
        if name == step:
            self._seen += 1
            if self._seen >= int(count):
                self._plan.write_text(f"died {step}", encoding="ascii")
                os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _passed(listener: DumpListener, values: dict[str, object], commit_ts: int) -> str:
        del commit_ts
        return "passed" if values["event_type"] == HIGH and listener.rounds else ""

    def _added(self, rows: LogRows, batches: list[Any]) -> str:
        del rows
        self._fresh = self._fresh or bool(batches)
        return "added" if batches else ""

    def _resolved(self, puller: LogPuller) -> str:
        del puller
        fresh, self._fresh = self._fresh, False
        return "resolved" if fresh else ""

    def _around(self, owner: type, name: str, step_of: At, *, after_only: bool = False) -> None:
        wrapped = getattr(owner, name)

        def around(*arguments: Any, **named: Any) -> Any:
            step = step_of(*arguments, **named)
            if step and not after_only:
                self.at(step + "-")
            result = wrapped(*arguments, **named)
            if step:
                self.at(step if after_only else step + "+")
            return result

        setattr(owner, name, around)

    def _around_async(self, owner: type, name: str, step_of: At) -> None:
        wrapped = getattr(owner, name)

        async def around(*arguments: Any, **named: Any) -> Any:
            step = step_of(*arguments, **named)
            if step:
                self.at(step + "-")
            result = await wrapped(*arguments, **named)
            if step:
                self.at(step + "+")
            return result

        setattr(owner, name, around)


def main() -> int:
    """Fork captures until standard input ends."""
    _die_with_parent()
    plan = Path(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _capture(plan, asked["flags"], asked["chunk_rows"])
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
    return 0


def _capture(plan: Path, flags: list[str], chunk_rows: int) -> None:
    """Be a capture; does not return."""
    status = 70
    try:
        _die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ChunkSize.__init__.__defaults__ = (chunk_rows,)
        Death(plan).plan()
        status = run_daemon(
            flags,
            "capture",
            CaptureConfig,
            open_capture,
            http_port=lambda: HttpPort(registry=REGISTRY),
        )
    except BaseException:  # noqa: BLE001 - the one place that can tell
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
