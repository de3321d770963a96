"""The server of a dump as the event loop asks it: connected when it is first needed, each call in a thread."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from server.dump.job import PARALLEL_MAX
from server.dump.mysql.reader import Server
from server.puller.mysql.asking import Askers
from server.puller.mysql.options import MySqlOptions

T = TypeVar("T")
_THREADS_MAX: Final = PARALLEL_MAX + 1


class ServerThreads:
    """Of one dump; on the event loop."""

    def __init__(self, changefeed: str, options: MySqlOptions) -> None:
        self._changefeed = changefeed
        self._options = options
        self._server: Server | None = None
        self._threads = Askers(_THREADS_MAX, f"dump {changefeed}")

    async def connected(self) -> Server:
        """The server; raises as `Server` does if it must log in."""
        if self._server is None:
            self._server = await self.call(Server, self._changefeed, self._options)
        return self._server

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What it returns, or raises, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def hang_up(self) -> None:
        """End the sessions, in which calls under way fail; the next `connected` has new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Nothing is asked any more."""
        self.hang_up()
