"""A front before a store, through which all workers' requests go: it knows whose each one is,
and can hold one back.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from server.rpc.client import connect


@dataclass
class Hold:
    """The next request of one method stops before the store sees it,
    or before its answer goes back.
    """

    method: str
    after: bool = False
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class StoreProxy:
    """`seen` has the method and the process of each request, in order of arrival."""

    address: str
    target: str = ""
    seen: list[tuple[str, int]] = field(default_factory=list)
    watched: set[int] = field(default_factory=set)
    _hold: Hold | None = None

    def hold(self, method: str, *, after: bool = False) -> Hold:
        """Hold back the next request of `method` that a watched process sends."""
        self._hold = Hold(method, after)
        return self._hold

    def of(self, pid: int) -> list[str]:
        """The methods that this process called."""
        return [method for method, caller in self.seen if caller == pid]

    async def forward(self, path: str, request: bytes, context: Any) -> bytes:
        """Send a request on, unless it is to be held."""
        method, caller = path.rpartition("/")[2], self._caller(context.peer())
        self.seen.append((method, caller))
        held = self._hold if self._hold and self._hold.method == method and caller else None
        if held:
            self._hold = None
            if not held.after:
                await self._stop(held)
        async with connect(self.target) as channel:
            answer = await channel.unary_unary(path)(request, timeout=60)
        if held and held.after:
            await self._stop(held)
        return bytes(answer)

    async def _stop(self, held: Hold) -> None:
        held.reached.set()
        await held.go_on.wait()

    def _caller(self, peer: str) -> int:
        port = int(peer.rpartition(":")[2])
        return next((pid for pid in self.watched if port in _ports(pid)), 0)


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc,type-arg]  # grpc's stubs leave it Any
    def __init__(self, proxy: StoreProxy) -> None:
        self._proxy = proxy

    def service(self, details: Any) -> Any:
        async def call(request: bytes, context: Any) -> bytes:
            try:
                return await self._proxy.forward(details.method, request, context)
            except grpc.aio.AioRpcError as err:
                await context.abort(err.code(), err.details())
                raise

        return grpc.unary_unary_rpc_method_handler(call)


@asynccontextmanager
async def store_proxy() -> AsyncIterator[StoreProxy]:
    """A proxy for the block; set its `target` before anything is sent."""
    server = grpc.aio.server()
    proxy = StoreProxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.add_generic_rpc_handlers((_Everything(proxy),))
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(0)


def _ports(pid: int) -> set[int]:
    """The local TCP ports of a process, as /proc knows them."""
    links: set[str] = set()
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.add(str(link.readlink()))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    return {
        int(fields[1].rpartition(":")[2], 16)
        for fields in lines
        if f"socket:[{fields[9]}]" in links
    }
