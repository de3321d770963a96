"""Any bytes: the connection goes on or ends, nothing is raised, and nothing is left behind."""

from hypothesis import given, settings
from hypothesis import strategies as st

from server.rpc.http2 import frames
from server.rpc.http2.frames import frame
from tests.unit.server.rpc.http2.wire import Client, message

KINDS = st.integers(0, 11)
NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 7, (1 << 31) - 1, 1 << 31])
BLOCK = Client().block()
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            BLOCK,
            BLOCK[:7],
            message(b"x"),
            message(bytes(50))[:20],
            b"\0\4\0\0\0\1",
            (1).to_bytes(4),
            bytes(8),
        ]
    ),
)
FRAMES = st.builds(frame, KINDS, st.integers(0, 255), NUMBERS, PAYLOADS)
BROKEN = st.one_of(FRAMES, FRAMES, FRAMES, st.binary(max_size=30))


@settings(max_examples=300)
@given(st.lists(BROKEN, max_size=30), st.integers(1, 200))
def test_any_frames_in_any_cut_end_the_connection_at_most(sent: list[bytes], cut: int) -> None:
    client = Client()
    raw = b"".join(sent)
    for at in range(0, len(raw), cut):
        client.send(raw[at : at + cut])
        client.take()
    connection = client.connection
    assert client.host.open_now == len(connection.streams)
    assert len(connection._rest) <= frames.MAX_FRAME_BYTES + frames.HEADER_BYTES
    connection.abort()
    assert not connection.streams
    assert not connection.waiting
    assert (client.host.open_now, client.host.request_bytes, connection.unsent_bytes) == (0, 0, 0)


@given(
    st.binary(max_size=200).filter(
        lambda sent: len(sent) <= 24 or not sent.startswith(frames.PREFACE)
    )
)
def test_any_first_bytes_end_the_connection_at_most(sent: bytes) -> None:
    client = Client(ready=False).send(sent)
    client.take()
    assert bool(client.connection.failed) == (not frames.PREFACE.startswith(sent[:24]))


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), min_size=1, max_size=6
    )
)
def test_a_good_conversation_with_wrong_bytes_in_it(changes: list[tuple[int, bytes]]) -> None:
    client = Client()
    good = bytearray(
        client.call(1, b"one")
        + client.headers(3)
        + client.call(5, bytes(100))
        + client.call(7, b"x")
    )
    for place, wrong in changes:
        at = place % len(good)
        good[at : at + len(wrong)] = wrong
    client.send(bytes(good))
    client.take()
    client.connection.abort()
    assert (client.host.open_now, client.host.request_bytes, client.connection.unsent_bytes) == (
        0,
        0,
        0,
    )
