"""No process that we start outlives us, whatever killed us; a restarted daemon listens where it
listened before.
"""

import ast
import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

import server
from server.process import Child, ChildFailedError, pinned

CHILD = (
    "import time; from server.process import exit_with_parent; exit_with_parent(); time.sleep(600)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""
STARTS = {"create_subprocess_exec", "create_subprocess_shell", "Popen", "run"}


async def test_a_child_ends_when_its_parent_is_killed():
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        watched = os.pidfd_open(int(await parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(watched, ended.set)
        await ended.wait()
        loop.remove_reader(watched)
        os.close(watched)


def test_every_process_that_is_started_holds_a_pipe_of_its_parent():
    """The pipe is what `exit_with_parent` and `--follow-parent` watch."""
    found = {}
    for path in Path(server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in STARTS
            ):
                owner = ast.unparse(node.func.value)
                if (
                    owner in ("asyncio", "subprocess", "asyncio.subprocess")
                    and node.func.attr != "run"
                ):
                    found[f"{path.name}:{node.lineno}"] = {
                        key.arg: ast.unparse(key.value) for key in node.keywords
                    }
                assert owner != "subprocess" or node.func.attr != "run", (
                    f"{path} starts a process without a pipe"
                )
    assert len(found) >= 3
    assert {place for place, given in found.items() if given.get("stdin") != "PIPE"} == set()


async def test_where_no_process_can_be_started_its_daemon_has_failed(monkeypatch):
    """A daemon that died is started again later; its parent goes on."""

    async def refused(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    with pytest.raises(ChildFailedError, match=r"store cannot be started: .*; look at the limits"):
        await Child("store", []).start()


def test_port_zero_is_replaced_by_the_bound_port():
    arguments = [
        "--addr",
        "127.0.0.1:0",
        "--flight-addr",
        "127.0.0.1:0",
        "--http-addr",
        "127.0.0.1:0",
        "--data-dir",
        "d",
    ]
    endpoints = {"capture": "127.0.0.1:11", "flight": "127.0.0.1:12", "http": "127.0.0.1:13"}
    assert pinned(arguments, "capture", endpoints) == [
        *(
            "--addr",
            "127.0.0.1:11",
            "--flight-addr",
            "127.0.0.1:12",
            "--http-addr",
            "127.0.0.1:13",
            "--data-dir",
            "d",
        )
    ]


def test_flags_without_an_endpoint_stay():
    assert pinned(["--coordinator", "a:1"], "store", {"store": "b:2"}) == ["--coordinator", "a:1"]
