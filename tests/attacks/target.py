"""What is attacked: a real daemon process.

What is judged: its pid, its memory, its log, and other clients' latency.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from server.rpc.config import Engine
from tests.attacks.der import Authority

ROOT = Path(__file__).parents[2]
GET_MEMBERS = "/pdpb.PD/GetMembers"
WRITE_BINLOG = "/binlog.Pump/WriteBinlog"
CHECK_HEALTH = "/grpc.health.v1.Health/Check"
LIST_ACTIONS = "/arrow.flight.protocol.FlightService/ListActions"

ATTEMPT_S = 30.0


class Target:
    """One port of a daemon, and the call that other clients make of it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Path,
        authority: Authority | None,
        *,
        name: str,
        method: str,
    ) -> None:
        """`name` is the daemon's for the port."""
        self.process = process
        self.method = method
        self.authority = authority
        self._log = log
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the daemon did not start:\n{self.log}"
        self.endpoints: dict[str, str] = json.loads(line)["endpoints"]
        self.address = self.endpoints[name]
        self.http = self.endpoints["http"]

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def rss_mib(self) -> float:
        """What it has now."""
        return self._status("VmRSS")

    @property
    def peak_rss_mib(self) -> float:
        """What it ever had since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def call(self, timeout_s: float = ATTEMPT_S, certificate: bytes | None = None) -> str:
        """One call on a new connection: `answered`, or the name of its status."""
        with self.channel(certificate) as channel:
            try:
                for _ in channel.unary_stream(self.method)(
                    b"", timeout=timeout_s, wait_for_ready=True
                ):
                    pass
            except grpc.RpcError as err:
                return "answered" if self._is_answer(err) else str(err.code().name)
            return "answered"

    @contextmanager
    def channel(self, certificate: bytes | None = None) -> Iterator[grpc.Channel]:
        """A client of its own: no connection is shared with another one."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        if self.authority is None:
            channel = grpc.insecure_channel(self.address, options)
        else:
            chain = certificate or self.authority.node.read_bytes()
            credentials = grpc.ssl_channel_credentials(
                self.authority.ca.read_bytes(), self.authority.key.read_bytes(), chain
            )
            channel = grpc.secure_channel(self.address, credentials, options)
        with channel:
            yield channel

    def metric(self, name: str) -> float:
        """A metric's value, 0 if it has none yet; `name` is a regular expression."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=ATTEMPT_S) as answer:
            text = answer.read().decode()
        match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def check_alive(self) -> None:
        """The same process goes on and answers."""
        assert self.process.poll() is None, (
            f"the daemon ended with {self.process.returncode}:\n{self.log[-3000:]}"
        )
        assert self.call() == "answered", self.log[-3000:]

    def _is_answer(self, err: grpc.RpcError) -> bool:
        """The pump's answer to a call without a cluster id is an error of its own."""
        return self.method == WRITE_BINLOG and err.code() is grpc.StatusCode.UNKNOWN

    def _status(self, key: str) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
        assert match, text
        return int(match[1]) / 1024


class Verdict:
    """What an attack did: filled in at the end of `judged`."""

    worst_s = 0.0
    """The longest that another client waited for one answer,
    refusals and new attempts included, cores' lack not.
    """
    worst_wall_s = 0.0
    """The same by the clock on the wall."""
    calls = 0
    peak_mib = 0.0
    """By how much the daemon's memory grew at its peak."""

    def __str__(self) -> str:
        worst = f"others' worst {self.worst_s:.2f} s ({self.worst_wall_s:.2f} s on the wall)"
        return f"{worst} of {self.calls} calls, RSS +{self.peak_mib:.0f} MiB"


@contextmanager
def judged(target: Target) -> Iterator[Verdict]:
    """Another client calls while the block attacks;
    afterwards the process must be the same and answer.
    """
    verdict = Verdict()
    pid, before = target.process.pid, target.rss_mib
    target.forget_peak()
    command = [
        sys.executable,
        "-m",
        "tests.attacks.victim",
        target.address,
        target.method,
        str(pid),
    ]
    victim = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        yield verdict
        output, _ = victim.communicate("", timeout=60)
        judgement = json.loads(output)
        verdict.worst_s, verdict.calls = judgement["worst_s"], judgement["calls"]
        verdict.worst_wall_s = judgement["worst_wall_s"]
        verdict.peak_mib = target.peak_rss_mib - before
    finally:
        victim.kill()
        victim.communicate()
    target.check_alive()
    assert target.process.pid == pid


@contextmanager
def coordinator(
    directory: Path, engine: Engine, authority: Authority | None = None, *, files: int = 0
) -> Iterator[Target]:
    """A coordinator over metadata of its own; `files` is how many it may open, 0:
    as many as this process.
    """
    arguments = [
        "coordinator",
        "--addr",
        "127.0.0.1:0",
        "--metadata",
        f"leveldb:{directory / 'metadata'}",
    ]
    with _running(arguments, directory, engine, authority, files=files) as (process, log):
        yield Target(process, log, authority, name="coordinator", method=GET_MEMBERS)


@contextmanager
def pump(directory: Path, engine: Engine, authority: Authority | None = None) -> Iterator[Target]:
    """A pump, and the coordinator it needs."""
    with coordinator(directory, engine, authority) as pd:
        arguments = ["pump", "--addr", "127.0.0.1:0", "--coordinator", pd.address]
        arguments += ["--data-dir", str(directory / "pump")]
        with _running(arguments, directory, engine, authority) as (process, log):
            yield Target(process, log, authority, name="pump", method=WRITE_BINLOG)


@contextmanager
def store(directory: Path, engine: Engine) -> Iterator[Target]:
    """A store, and the coordinator it needs."""
    with coordinator(directory, engine) as pd:
        arguments = [
            "store",
            "--addr",
            "127.0.0.1:0",
            "--coordinator",
            pd.address,
            "--data-dir",
            str(directory / "store"),
        ]
        with _running(arguments, directory, engine, None) as (process, log):
            yield Target(process, log, None, name="store", method=CHECK_HEALTH)


@contextmanager
def capture(directory: Path, engine: Engine, name: str) -> Iterator[Target]:
    """A capture's port `capture` or `flight`, and the coordinator it needs."""
    with coordinator(directory, engine) as pd:
        arguments = [
            "capture",
            "--addr",
            "127.0.0.1:0",
            "--flight-addr",
            "127.0.0.1:0",
            "--coordinator",
            pd.address,
        ]
        with _running(
            [*arguments, "--data-dir", str(directory / "capture")], directory, engine, None
        ) as (
            process,
            log,
        ):
            method = LIST_ACTIONS if name == "flight" else CHECK_HEALTH
            yield Target(process, log, None, name=name, method=method)


@contextmanager
def _running(
    arguments: Sequence[str],
    directory: Path,
    engine: Engine,
    authority: Authority | None,
    *,
    files: int = 0,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = directory / f"{arguments[0]}.log"
    command = [
        *(["prlimit", f"--nofile={files}:{files}"] if files else []),
        sys.executable,
        "-m",
        "server.cli.main",
        *arguments,
        "--http-addr",
        "127.0.0.1:0",
    ]
    command += authority.flags() if authority else []
    environment = {**os.environ, "TIDEMARK_RPC_RPC_ENGINE": engine.value}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'proto' / 'gen'}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=output, cwd=ROOT
        )
    try:
        yield process, log
    finally:
        process.kill()
        process.communicate()
