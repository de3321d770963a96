"""Batch routes: what waits together is answered together, each call with its own answer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.errors import status_of
from server.rpc.front import (
    MAX_BYTES,
    MAX_ITEMS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    Answer,
    OverloadedError,
    Route,
)
from storage.model.errors import InvalidError, UnavailableError
from storage.tasks import background_tasks


class Handler:
    """Answers each request with itself in capitals, once `go` is set; remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.go = asyncio.Event()

    async def __call__(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        self.batches.append(list(requests))
        await self.go.wait()
        return [
            InvalidError("bad") if request == b"bad" else request.upper() for request in requests
        ]


@asynccontextmanager
async def running(handler: Callable[[Sequence[bytes]], object]) -> AsyncIterator[Route]:
    route = Route("Example/Method", handler)  # type: ignore[arg-type]  # tests give handlers that fail, too
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(route.run())
        yield route
        loop.cancel()


async def calls(route: Route, requests: Sequence[bytes]) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(route.call(request)) for request in requests]
    return [task.result() for task in made]


async def test_one_call_does_not_wait_for_company() -> None:
    handler = Handler()
    handler.go.set()
    async with running(handler) as route:
        assert await route.call(b"a") == b"A"


async def test_what_comes_during_a_batch_is_the_next_batch() -> None:
    handler = Handler()
    async with running(handler) as route, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(route.call(b"a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        rest = tasks.create_task(calls(route, [b"b", b"c"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        handler.go.set()
        assert await rest == [b"B", b"C"]
    assert first.result() == b"A"
    assert handler.batches == [[b"a"], [b"b", b"c"]]


async def test_a_bad_request_does_not_fail_its_neighbours() -> None:
    handler = Handler()
    handler.go.set()
    async with running(handler) as route:
        good, bad, other = await calls(route, [b"a", b"bad", b"c"])
    assert (good, other) == (b"A", b"C")
    assert isinstance(bad, InvalidError)


async def test_an_error_of_the_whole_batch_is_everybodys_answer() -> None:
    async def fails(_: Sequence[bytes]) -> Sequence[Answer]:
        raise UnavailableError("no disk")

    async with running(fails) as route:
        assert [str(answer) for answer in await calls(route, [b"a", b"b"])] == [
            "[TM:ErrUnavailable] no disk"
        ] * 2
        assert isinstance(await route.call(b"again"), UnavailableError)


async def test_a_caller_that_gives_up_disturbs_nobody() -> None:
    handler = Handler()
    async with running(handler) as route, asyncio.TaskGroup() as tasks:
        leaving = tasks.create_task(route.call(b"a"))
        staying = tasks.create_task(route.call(b"b"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        handler.go.set()
        assert await staying == b"B"


async def test_beyond_the_bound_calls_are_refused_at_once() -> None:
    route = Route("Example/Method", Handler())
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(route.call(b"x")) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        assert isinstance(await route.call(b"x"), OverloadedError)
        for task in waiting:
            task.cancel()


async def test_a_defect_of_a_handler_ends_the_calls_of_its_batch_and_not_the_route() -> None:
    async def defective(requests: Sequence[bytes]) -> Sequence[Answer]:
        return [bytes([1 // len(request)]) for request in requests if request != b"forgotten"]

    route = Route("Example/Method", defective)
    async with background_tasks(route.run()):
        assert "unexpected ZeroDivisionError" in str(await route.call(b""))
        assert "unexpected AssertionError" in str(await route.call(b"forgotten"))
        assert await route.call(b"a") == b"\1"


@given(st.lists(st.integers(0, MAX_BYTES), max_size=40))
def test_batches_keep_order_and_bounds(sizes: list[int]) -> None:
    async def run() -> list[list[bytes]]:
        handler = Handler()
        handler.go.set()
        requests = [bytes([number]) + bytes(size) for number, size in enumerate(sizes)]
        async with running(handler) as route:
            assert await calls(route, requests) == [request.upper() for request in requests]
        assert [request for batch in handler.batches for request in batch] == requests
        return handler.batches

    for batch in asyncio.run(run()):
        assert len(batch) <= MAX_ITEMS
        assert sum(len(request) for request in batch[:-1]) < MAX_BYTES


async def test_waiting_bytes_are_bounded_but_one_call_of_any_size_may_wait() -> None:
    route = Route("Example/Method", Handler())
    huge = bytes(MAX_WAITING_BYTES + 1)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(route.call(huge))
        await asyncio.sleep(0)
        refused = await route.call(b"x")
        assert status_of(refused) == (  # type: ignore[arg-type]  # anything else fails here
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            (
                f"1 calls of Example/Method with {len(huge)} bytes are waiting; slow down and try "
                "again"
            ),
        )
        waiting.cancel()


async def test_a_call_given_up_in_the_queue_is_not_made_and_frees_its_bytes() -> None:
    handler = Handler()
    async with running(handler) as route, asyncio.TaskGroup() as tasks:
        busy = tasks.create_task(route.call(b"a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving = tasks.create_task(route.call(bytes(MAX_WAITING_BYTES)))
        await asyncio.sleep(0)
        leaving.cancel()
        handler.go.set()
        assert await busy == b"A"
        assert await calls(route, [b"b", b"c"]) == [b"B", b"C"]
    assert handler.batches == [[b"a"], [b"b", b"c"]]
