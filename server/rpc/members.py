"""The coordinators of a cluster and their leader, found by GetMembers: ours or a real PD's.

All known coordinators are asked at once, and the first answer that names a leader counts: a wrong
answer (of a member that lags behind) costs one refused call, after which all are asked again.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog
from kvproto import pdpb_pb2
from kvproto.pdpb_pb2_grpc import PDStub

from server.rpc.client import LoginInAddressError, connect
from server.rpc.credentials import SecurityConfig
from storage.model.errors import InvalidError, UnavailableError

if TYPE_CHECKING:
    from kvproto.pdpb_pb2_grpc import PDAsyncStub

_ASK_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class NoAddressError(InvalidError):
    """No coordinator is named, or by what is no address."""

    code = "ErrNoCoordinatorAddress"


class NoLeaderError(UnavailableError):
    """No coordinator that answers knows the leader."""

    code = "ErrNoLeader"


def addresses_of(text: str) -> list[str]:
    """The addresses in `host:port[,host:port…]`, each with its scheme, if it has one.

    Raises:
        NoAddressError: there are none, or one has no port: gRPC would take 443.
        LoginInAddressError: one has a login, too.
    """
    LoginInAddressError.check(text)
    addresses = [address.strip().rstrip("/") for address in text.split(",") if address.strip()]
    if not addresses:
        raise NoAddressError(f"{text!r} names no coordinator; write host:port[,host:port…]")
    for address in addresses:
        host, _, port = address.rpartition("//")[2].rpartition(":")
        if not (host and port.isdecimal()):
            raise NoAddressError(f"the coordinator {address!r} is not host:port, such as pd1:2379")
    return addresses


class Members:
    """Finds the leader, and remembers it until `forget_leader`; `stack` closes the channels."""

    def __init__(
        self, addresses: Sequence[str], security: SecurityConfig | None, stack: AsyncExitStack
    ) -> None:
        self.cluster_id = 0
        """0 until the first answer; from then on answers of other clusters are not believed."""
        self._named = list(addresses)
        self._learned: list[str] = []
        self._security = security
        self._stack = stack
        self._stubs: dict[str, PDAsyncStub] = {}
        self._leader = self._reported = ""
        self._asking = asyncio.Lock()

    async def leader(self) -> "PDAsyncStub":
        """The leader's calls.

        Raises:
            NoLeaderError: nobody names one now; ask again later.
        """
        async with self._asking:
            if not self._leader:
                self._leader = await self._find_leader()
                self._report()
        return self._stub(self._leader)

    async def address(self) -> str:
        """The leader's address; raises as `leader`."""
        await self.leader()
        return self._leader

    def forget_leader(self, leader: "PDAsyncStub | None") -> None:
        """Look for the leader again before the next call, unless that happened since `leader` was
        called.
        """
        # Of a hundred calls that fail with the old leader, the first one asks anew; the others must
        # not undo its answer.
        if leader is not None and self._stubs.get(self._leader) is leader:
            self._leader = ""

    def _report(self) -> None:
        if self._leader != self._reported:
            _log.info("coordinator found", leader=self._leader, cluster_id=self.cluster_id)
            self._reported = self._leader

    async def _find_leader(self) -> str:
        failures: list[str] = []
        leaders: list[str] = []

        async def ask(address: str) -> None:
            try:
                answer = await self._stub(address).GetMembers(
                    pdpb_pb2.GetMembersRequest(), timeout=_ASK_SECONDS
                )
                leaders.append(self._leader_of(address, answer))
            except grpc.aio.AioRpcError as err:
                failures.append(f"{address}: {err.details() or err.code().name}")
            except NoLeaderError as err:
                failures.append(f"{address}: {err.message}")
            if leaders:
                # The first answer counts; waiting for the others would cost two seconds whenever a
                # member is down.
                for task in asking:
                    task.cancel()

        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(ask(address), name=f"members-{address}")
                for address in dict.fromkeys(self._named + self._learned)
            ]
        if not leaders:
            raise NoLeaderError("; ".join(failures))
        return leaders[0]

    def _leader_of(self, address: str, answer: pdpb_pb2.GetMembersResponse) -> str:
        header = answer.header
        if self.cluster_id not in (0, header.cluster_id):
            raise NoLeaderError(f"it belongs to cluster {header.cluster_id}, not {self.cluster_id}")
        if not answer.leader.client_urls:
            raise NoLeaderError(header.error.message or "it knows no leader")
        self.cluster_id = header.cluster_id
        self._learned = [
            _target(member.client_urls[0]) for member in answer.members if member.client_urls
        ]
        # then the way we came is the way to it, whatever it calls itself
        alone = len(self._learned) == 1
        return address if alone else _target(answer.leader.client_urls[0])

    def _stub(self, address: str) -> "PDAsyncStub":
        if address not in self._stubs:
            channel = connect(address, self._security)
            self._stack.push_async_exit(channel)
            self._stubs[address] = PDStub(channel)
        return self._stubs[address]


def _target(url: str) -> str:
    return url.rpartition("//")[2]
