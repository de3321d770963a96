"""What is told of a handshake does not depend on the pieces in which its bytes come."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from server.rpc.credentials import LATE_HANDSHAKE, HandshakeFault
from server.rpc.handshake_watch import HandshakeWatch

RECORDS = st.builds(
    lambda kind, body: bytes((kind, 3, 3)) + len(body).to_bytes(2) + body,
    st.sampled_from((20, 21, 22, 23)),
    st.one_of(st.binary(max_size=12), st.sampled_from((bytes(19), bytes(60), bytes(300)))),
)
SIDES = st.sampled_from(("client", "server"))
PARTS = st.lists(st.tuples(SIDES, st.one_of(RECORDS, st.binary(max_size=20))), max_size=12)


def told(parts: Sequence[tuple[str, bytes]], piece: int) -> list[HandshakeFault]:
    """What is reported, each part coming in pieces of so many bytes."""
    faults: list[HandshakeFault] = []
    watch = HandshakeWatch(faults.append)
    takes = {"client": watch.client_sent, "server": watch.server_sent}
    for side, data in parts:
        for at in range(0, len(data), piece):
            takes[side](data[at : at + piece])
    watch.server_closed()
    return faults


@given(PARTS, st.integers(1, 400))
def test_it_is_told_once_and_the_same_in_whatever_pieces(parts, piece):
    whole = told(parts, 1 << 16)
    assert told(parts, piece) == whole
    assert len(whole) <= 1


@given(PARTS)
def test_a_client_that_went_away_first_has_not_failed(parts):
    faults: list[HandshakeFault] = []
    watch = HandshakeWatch(faults.append)
    watch.client_closed()
    for _, data in parts:
        watch.client_sent(data)
        watch.server_sent(data)
    watch.server_closed()
    assert faults == []


@given(PARTS)
def test_one_that_is_late_is_told_unless_it_is_over(parts):
    faults: list[HandshakeFault] = []
    watch = HandshakeWatch(faults.append)
    takes = {"client": watch.client_sent, "server": watch.server_sent}
    for side, data in parts:
        takes[side](data)
    before, was_over = list(faults), watch.is_over
    watch.end_late()
    assert faults == before + ([] if was_over else [LATE_HANDSHAKE])
