"""Tso in batches: every request has its own timestamps, in order, and a bad one fails alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvproto import pdpb_pb2

from server.coordinator.errors import RequestError
from server.coordinator.header import Headers
from server.coordinator.leadership.leadership import Leadership
from server.coordinator.tso import TsoService
from server.rpc.errors import StatusError
from storage.model.ts import LOGICAL_MAX, compose

CLUSTER = 7
COUNTS = st.one_of(
    st.integers(1, 200),
    st.sampled_from([0, 1, LOGICAL_MAX // 8, LOGICAL_MAX // 8 + 1, LOGICAL_MAX, LOGICAL_MAX + 1]),
)


class Clock:
    """An oracle whose next millisecond comes whenever this one is used up."""

    def __init__(self) -> None:
        self.physical_ms, self.logical = 1000, 0
        self.asked = 0

    async def take(self, count: int) -> tuple[int, int]:
        self.asked += 1
        if not 0 < count <= LOGICAL_MAX:
            raise RequestError("that many")
        if self.logical + count > LOGICAL_MAX:
            self.physical_ms, self.logical = self.physical_ms + 1, 0
        self.logical += count
        return self.physical_ms, self.logical


def service() -> tuple[TsoService, Clock]:
    clock: Any = Clock()
    return TsoService(Headers(CLUSTER, lambda: True, Leadership()), clock), clock


def request(count: int, cluster: int = CLUSTER) -> bytes:
    return pdpb_pb2.TsoRequest(
        header=pdpb_pb2.RequestHeader(cluster_id=cluster), count=count
    ).SerializeToString()


@given(
    st.lists(
        st.one_of(COUNTS.map(request), st.just(request(5, cluster=8)), st.just(b"\xff")),
        max_size=30,
    )
)
async def test_ranges_never_meet_and_keep_the_order_of_requests(raws: list[bytes]) -> None:
    tso, _ = service()
    answers = await tso.Tso(raws)
    assert len(answers) == len(raws)
    last = 0
    for raw, answer in zip(raws, answers, strict=True):
        if isinstance(answer, StatusError):
            count = 0 if raw == b"\xff" else pdpb_pb2.TsoRequest.FromString(raw).count
            assert raw in (b"\xff", request(5, cluster=8)) or not 0 < count <= LOGICAL_MAX
            continue
        assert isinstance(answer, bytes)
        found = pdpb_pb2.TsoResponse.FromString(answer)
        asked = pdpb_pb2.TsoRequest.FromString(raw).count
        assert found.count == asked
        end = compose(found.timestamp.physical, found.timestamp.logical)
        assert end - asked >= last
        assert found.timestamp.logical >= asked
        last = end


async def test_a_batch_asks_the_oracle_once() -> None:
    tso, clock = service()
    await tso.Tso([request(100)] * 128)
    assert clock.asked == 1
