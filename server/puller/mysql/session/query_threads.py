"""Threads that ask a database server: it may take a minute to answer, or to be given up."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Askers(Executor):
    """Makes each call in a thread of its own; the end of the process waits for none of them.

    So only calls that ask, and keep nothing of ours open, belong here.
    """

    def __init__(self, most: int, name: str) -> None:
        """At most `most` calls are made at once; the others wait."""
        self._name = name
        self._free = threading.Semaphore(most)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        future: Future[T] = Future()
        call = partial(fn, *args, **kwargs)
        threading.Thread(
            target=self._make, args=(future, call), name=self._name, daemon=True
        ).start()
        return future

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> None:
        with self._free:
            if not future.set_running_or_notify_cancel():
                return
            try:
                answer = call()
            except BaseException as err:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(err)
            else:
                future.set_result(answer)
