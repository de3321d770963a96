"""Peers beside which `make bench` measures: their programs are given by the environment.

`PEER_PD=/path/to/pd-server` and `PEER_PUMP=/path/to/pump` (which needs the PD, too). A peer runs on
a directory and on ports of its own while its bench does, and is killed afterwards.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
from kvproto import pdpb_pb2, pdpb_pb2_grpc

from tests.ports import free_port

VARIABLES = {"pd": ("PEER_PD",), "pump": ("PEER_PD", "PEER_PUMP")}
_PATIENCE_S = 60.0


def is_given(peer: str) -> bool:
    """Whether the environment names all programs that this peer needs."""
    return bool(peer) and all(os.environ.get(name) for name in VARIABLES[peer])


@contextmanager
def running_peer(peer: str) -> Iterator[list[str]]:
    """Start a peer that `is_given`; yields the flags by which a bench measures it."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-peer-"))
        pd, pd_address = stack.enter_context(_running_pd(f"{directory}/pd"))
        cluster_id = _cluster_id(pd_address)
        if peer == "pd":
            yield ["--addr", pd_address, "--pid", str(pd.pid)]
            return
        pump, address = stack.enter_context(_running_pump(f"{directory}/pump", pd_address))
        _wait_for_port(address)
        yield ["--addr", address, "--pid", str(pump.pid), "--cluster-id", str(cluster_id)]


@contextmanager
def _running_pd(directory: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    address, peer_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--name", "pd", "--data-dir", directory, "--log-file", f"{directory}.log"]
    flags += ["--client-urls", f"http://{address}", "--peer-urls", f"http://{peer_address}"]
    with _running([os.environ["PEER_PD"], *flags]) as process:
        yield process, address


@contextmanager
def _running_pump(directory: str, pd: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    address = f"127.0.0.1:{free_port()}"
    flags = ["-addr", address, "-pd-urls", f"http://{pd}", "-data-dir", directory]
    flags += ["-log-file", f"{directory}.log"]
    with _running([os.environ["PEER_PUMP"], *flags]) as process:
        yield process, address


@contextmanager
def _running(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _cluster_id(address: str) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    with grpc.insecure_channel(address) as channel:
        stub = pdpb_pb2_grpc.PDStub(channel)
        while True:
            try:
                members = stub.GetMembers(pdpb_pb2.GetMembersRequest())
            except grpc.RpcError:
                _check_patience(deadline, address)
            else:
                if members.leader.member_id:
                    return int(members.header.cluster_id)
            time.sleep(0.2)


def _wait_for_port(address: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    with grpc.insecure_channel(address) as channel:
        ready = grpc.channel_ready_future(channel)
        ready.result(timeout=max(0.0, deadline - time.monotonic()))


def _check_patience(deadline: float, address: str) -> None:
    if time.monotonic() > deadline:
        raise SystemExit(f"the peer at {address} does not answer within {_PATIENCE_S:g} s")
