"""Three coordinators over one etcd cluster, as the fault tests break them."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from kvproto import pdpb_pb2
from kvproto.pdpb_pb2_grpc import PDStub

from server.rpc.credentials import SecurityConfig, channel_credentials
from tests.integration.coordinator.processes import Coordinator, Etcd, etcd_members
from tests.ports import free_ports


@dataclass
class Cluster:
    """Its processes."""

    etcd: list[Etcd]
    coordinators: list[Coordinator]

    @property
    def addresses(self) -> list[str]:
        return [coordinator.address for coordinator in self.coordinators]

    @property
    def followers(self) -> list[Coordinator]:
        leader = self.leader()
        return [coordinator for coordinator in self.coordinators if coordinator is not leader]

    def leader(self, *, but: Coordinator | None = None, seconds: float = 60) -> Coordinator:
        """Who answers as the leader; waits until that is another one than `but`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for coordinator in self.coordinators:
                if coordinator is not but and members_of(coordinator.address).leads:
                    return coordinator
            time.sleep(0.05)
        raise AssertionError(
            f"no leader; the logs end with: {[one.log[-300:] for one in self.coordinators]}"
        )

    def heal(self) -> None:
        """Start again what is down."""
        for daemon in (*self.etcd, *self.coordinators):
            if not daemon.running:
                daemon.launch()
        self.wait_listening()
        self.leader()

    def wait_until_nobody_leads(self, seconds: float = 60) -> None:
        """No coordinator knows a leader."""
        deadline = time.monotonic() + seconds
        while any(members_of(address).leader for address in self.addresses):
            assert time.monotonic() < deadline, "somebody still leads"
            time.sleep(0.05)

    def wait_listening(self, seconds: float = 60) -> None:
        """Every coordinator answers, whoever leads."""
        deadline = time.monotonic() + seconds
        while not all(members_of(address).cluster_id for address in self.addresses):
            assert time.monotonic() < deadline, (
                f"not listening: {[one.log[-300:] for one in self.coordinators]}"
            )
            time.sleep(0.05)


@dataclass(frozen=True)
class View:
    """One coordinator's answer to GetMembers."""

    address: str
    cluster_id: int
    leader: str
    members: list[str]

    @property
    def leads(self) -> bool:
        return self.leader == self.address


def members_of(address: str, security: SecurityConfig | None = None) -> View:
    """What a coordinator says about all; of one that does not answer, nothing."""
    files = channel_credentials(security or SecurityConfig())
    credentials = files.current() if files else None
    with (
        grpc.secure_channel(address, credentials)
        if credentials
        else grpc.insecure_channel(address) as channel
    ):
        stub: Any = PDStub(channel)
        try:
            answer = stub.GetMembers(pdpb_pb2.GetMembersRequest(), timeout=5)
        except grpc.RpcError:
            return View(address, 0, "", [])
    urls = [member.client_urls[0].rpartition("//")[2] for member in answer.members]
    leader = answer.leader.client_urls[0].rpartition("//")[2] if answer.leader.client_urls else ""
    return View(address, answer.header.cluster_id, leader, sorted(urls))


@contextmanager
def running_cluster(
    directory: Path, *, etcds: int = 1, flags: Sequence[str] = (), **of_etcd: Any
) -> Iterator[Cluster]:
    """A healthy cluster that ends with the block; `flags` are of coordinators,
    the rest is of `Etcd`.
    """
    with etcd_members(directory, etcds, **of_etcd) as etcd:
        metadata = "etcd://" + ",".join(member.address for member in etcd)
        coordinators = [
            Coordinator(
                f"127.0.0.1:{port}", metadata, directory / f"coordinator{number}.log", flags
            )
            for number, port in enumerate(free_ports(3))
        ]
        cluster = Cluster(etcd, coordinators)
        try:
            for coordinator in coordinators:
                coordinator.launch()
            cluster.heal()
            yield cluster
        finally:
            for coordinator in coordinators:
                coordinator.kill()


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`function` without stopping the callers."""
    return await asyncio.to_thread(function, *arguments, **named)
