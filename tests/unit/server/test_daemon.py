"""A daemon's life, in processes of its own: the ready line, signals, exit codes,
errors said once, a lost parent.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from server.daemon import ready_text

DAEMON = """
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
import asyncio
from server.cli.daemon import run_daemon
from server.config import setting
from storage.model.errors import UnavailableError

@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    addr: str = setting("127.0.0.1:0", "address")
    http_addr: str = setting("127.0.0.1:0", "address")
    fail: str = setting("", "when to fail: opening, running")

async def breaks():
    raise UnavailableError("the disk is gone")

@asynccontextmanager
async def opened(config, security):
    if config.fail == "opening":
        raise UnavailableError("the disk is gone")
    async with asyncio.TaskGroup() as tasks:
        if config.fail == "running":
            tasks.create_task(breaks())
        yield {"store": config.addr, "cluster_id": "7"}
    print("drained", file=sys.stderr)

sys.exit(run_daemon(sys.argv[1:], "store", Example, opened))
"""


@contextmanager
def daemon(
    *arguments: str, prefix: Sequence[str] = (), **environ: str
) -> Iterator["subprocess.Popen[str]"]:
    """`prefix` is a command that becomes the daemon."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(DAEMON), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **environ,
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: "subprocess.Popen[str]") -> dict[str, object]:
    assert process.stdout is not None
    line: dict[str, object] = json.loads(process.stdout.readline())
    return line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_drains_on_a_signal(number: signal.Signals) -> None:
    with daemon("--addr", "127.0.0.1:1") as process:
        line = ready(process)
        endpoints = line["endpoints"]
        assert isinstance(endpoints, dict)
        assert (line["ready"], line["cluster_id"], endpoints["store"]) == (True, 7, "127.0.0.1:1")
        assert not endpoints["http"].endswith(":0")
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0
        assert out == ""
        assert "drained" in err


def test_a_terminal_shows_a_text_instead_of_the_line_for_programs() -> None:
    places = {"cluster_id": "7", "capture": "c:1", "capture_http": "c:2", "http": "h:3"}
    shown = ready_text(places)
    assert shown.splitlines()[1:] == [
        "Ready: capture c:1, http h:3.",
        "A browser shows the console at c:1.",
        "Ctrl-C ends it.",
    ]
    assert "console" not in ready_text({"store": "s:1", "http": "h:2"})


def test_what_it_logs_changes_while_it_runs() -> None:
    with daemon() as process:
        endpoints = ready(process)["endpoints"]
        assert isinstance(endpoints, dict)

        def ask(
            method: str, body: bytes | None = None, path: str = "/log-level"
        ) -> tuple[int, bytes]:
            asked = HTTPConnection(endpoints["http"], timeout=60)
            asked.request(method, path, body)
            answer = asked.getresponse()
            said = answer.status, answer.read()
            asked.close()
            return said

        assert ask("GET") == (200, b"info\n")
        assert ask("PUT", b"error\n") == (200, b"error\n")
        assert ask("PUT", b"warning") == (200, b"warning\n")
        assert ask("PUT", b"loud")[0] == 400
        assert ask("GET") == (200, b"warning\n")
        assert ask("GET", path="/log-redact") == (200, b"off\n")
        assert ask("PUT", b"ON", "/log-redact") == (200, b"on\n")
        assert ask("PUT", b"maybe", "/log-redact")[0] == 400
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert "the log level was changed" in err
    assert "redaction of the log was changed" in err
    assert "daemon draining" not in err


@pytest.mark.parametrize("when", ["opening", "running"])
def test_an_error_is_said_once_and_ends_it_with_status_1(when: str) -> None:
    with daemon("--fail", when) as process:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        lines = [line for line in err.splitlines() if line.startswith("[TM:")]
        assert lines == ["[TM:ErrUnavailable] the disk is gone"]
        assert "Traceback" not in err


def test_a_busy_http_port_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with daemon("--http-addr", address) as process:
            _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"[TM:ErrPortInUse] cannot listen on {address} for HTTP" in err


def test_a_misspelt_variable_is_refused_with_the_nearest() -> None:
    with daemon(TIDEMARK_STORE_ADR="x") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert (
        "[TM:ErrConfigInvalid] unknown configuration key TIDEMARK_STORE_ADR, did you mean "
        "TIDEMARK_STORE_ADDR?" in err
    )


def test_a_daemon_whose_parent_is_gone_ends_at_once() -> None:
    with daemon("--follow-parent") as process:
        ready(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=120) == 1


def test_it_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with daemon(prefix=["prlimit", f"--nofile={min(256, hard)}:{hard}"]) as process:
        ready(process)
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    [files] = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    assert files[3:5] == [str(hard), str(hard)]
