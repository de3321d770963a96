"""The open calls of a client, by endpoint: when one of them finds a server silent, all calls to it end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storage.meta.errors import MetaUnavailableError


class OpenCalls:
    """Calls, unary ones too, whose answers are waited for."""

    def __init__(self) -> None:
        self._open: dict[Any, str] = {}

    @contextmanager
    def reading(self, call: Any, address: str) -> Iterator[None]:
        """Own `call` to `address` for the block, which reads it.

        Raises:
            MetaUnavailableError: the call was ended from here, or had ended before it was used.
        """
        self._open[call] = address
        try:
            yield
        except asyncio.InvalidStateError as err:  # gRPC's word for using a call that has ended
            raise MetaUnavailableError(f"{address} ended a stream; try again") from err
        except asyncio.CancelledError as err:
            if is_cancelled():
                raise
            raise MetaUnavailableError(f"{address} is silent; try again") from err
        finally:
            self._open.pop(call, None)
            call.cancel()

    def give_up(self, address: str) -> None:
        """End all calls to a server that fell silent."""
        for call, used in list(self._open.items()):
            if used == address:
                call.cancel()


def is_cancelled() -> bool:
    """Whether this task is; gRPC raises the same error in whoever reads a call that somebody else cancelled."""
    return cancellations() > 0


def cancellations() -> int:
    """How often this task was asked to end; compare with an earlier answer."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
