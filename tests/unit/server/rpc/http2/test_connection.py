"""RFC 9113 frame by frame: what is understood, what resets a stream, what ends the connection."""

import pytest
from hpack import Encoder

from server.rpc.http2 import frames
from server.rpc.http2.frames import ErrorCode, frame, window_update
from server.rpc.http2.peer import Bounds
from server.rpc.http2.stream import STREAM_WINDOW
from tests.unit.server.rpc.http2.wire import BOUNDS, CALL, Client, Echo, EchoHost, data, message

PRIORITY_BYTES = bytes(4) + b"\x10"


def ended_with(client: Client) -> ErrorCode:
    """The code of the GOAWAY that was the last frame; and nothing more is heard."""
    last = client.take()[-1]
    assert last.kind == frames.GOAWAY
    assert client.connection.failed
    assert client.send(client.headers(99, end_stream=True)).take() == []
    return last.code


def reset_with(client: Client, stream: int) -> ErrorCode:
    """The code of the RST_STREAM of a stream; the connection goes on."""
    (found,) = [one for one in client.take() if one.kind == frames.RST_STREAM]
    assert found.stream == stream
    assert client.send(client.call(1001, b"still here")).answer(1001)[1] == message(b"still here")
    return found.code


def test_the_server_introduces_itself_before_it_hears_anything() -> None:
    settings, update = Client(ready=False).take()
    assert (settings.kind, settings.flags, settings.stream) == (frames.SETTINGS, 0, 0)
    assert dict(frames.setting_pairs(settings.payload)) == {3: 100, 4: STREAM_WINDOW, 6: 16 << 10}
    assert (update.kind, update.stream) == (frames.WINDOW_UPDATE, 0)


def test_a_call_is_answered_with_headers_a_message_and_trailers() -> None:
    client = Client().send(Client().call(1, b"hello"))
    assert client.kinds() == [frames.HEADERS, frames.DATA, frames.HEADERS]
    client = Client()
    fields, body = client.send(client.call(1, b"hello")).answer(1)
    assert fields == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
    assert body == message(b"hello")
    assert client.host.open_now == 0


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    client = Client(ready=False)
    sent = frames.PREFACE + frames.settings({}) + client.call(1, bytes(500)) + client.call(3, b"b")
    client.send(*(sent[at : at + size] for at in range(0, len(sent), size)))
    assert [one.got for one in client.host.opened] == [[bytes(500)], [b"b"]]


def test_calls_may_be_interleaved() -> None:
    client = Client()
    client.send(
        client.headers(1),
        client.headers(3),
        data(3, message(b"three")[:4]),
        data(1, message(b"one")),
    )
    client.send(data(3, message(b"three")[4:], end_stream=True), data(1, b"", end_stream=True))
    assert [one.got for one in client.host.opened] == [[b"one"], [b"three"]]


def test_what_is_no_preface_ends_the_connection() -> None:
    client = Client(ready=False).send(b"GET / HTTP/1.1\r\n")
    assert ended_with(client) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [frame(frames.PING, 0, 0, bytes(8)), frame(frames.DATA, 0, 1)])
def test_settings_come_first(first: bytes) -> None:
    assert ended_with(Client(ready=False).send(frames.PREFACE + first)) is ErrorCode.PROTOCOL_ERROR


FAULTS = {
    "frame too large": (frame(frames.DATA, 0, 1, bytes(16_385)), ErrorCode.FRAME_SIZE_ERROR),
    "length of a frame too large, without its bytes": (
        b"\xff\xff\xff\0\0\0\0\0\1",
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "data of stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data of an idle stream": (frame(frames.DATA, 0, 7, b"x"), ErrorCode.PROTOCOL_ERROR),
    "headers of stream 0": (frame(frames.HEADERS, 5, 0, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "headers of an even stream": (frame(frames.HEADERS, 5, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
    "headers padded beyond their end": (
        frame(frames.HEADERS, 0xD, 1, b"\x05\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers padded without a length": (frame(frames.HEADERS, 0xD, 1), ErrorCode.FRAME_SIZE_ERROR),
    "headers with half a priority": (
        frame(frames.HEADERS, 0x25, 1, b"\0\0"),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "headers that depend on themselves": (
        frame(frames.HEADERS, 0x25, 1, (1).to_bytes(4) + b"\0\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "continuation of nothing": (
        frame(frames.CONTINUATION, 4, 1, b"\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a ping between headers and their continuation": (
        frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "continuation of another stream": (
        frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.CONTINUATION, 4, 3, b"\x82"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "an unknown frame between headers and their continuation": (
        frame(frames.HEADERS, 0, 1, b"\x82") + frame(77, 0, 1),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "an index no table has": (frame(frames.HEADERS, 5, 1, b"\xfe"), ErrorCode.COMPRESSION_ERROR),
    "an index of 0": (frame(frames.HEADERS, 5, 1, b"\x80"), ErrorCode.COMPRESSION_ERROR),
    "a literal that is cut off": (
        frame(frames.HEADERS, 5, 1, b"\x40\x0aabc"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "an integer without end": (
        frame(frames.HEADERS, 5, 1, b"\xff" + b"\xff" * 12),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a table that is too large": (
        frame(frames.HEADERS, 5, 1, b"\x3f\xff\xff\x03"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a table resized after a field": (
        frame(frames.HEADERS, 5, 1, b"\x82\x20"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a Huffman string with wrong padding": (
        frame(frames.HEADERS, 5, 1, b"\0\x81\0\0"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "priority of stream 0": (
        frame(frames.PRIORITY, 0, 0, PRIORITY_BYTES),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "rst_stream of stream 0": (frame(frames.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "rst_stream of an idle stream": (
        frame(frames.RST_STREAM, 0, 9, bytes(4)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "rst_stream that is too short": (
        frame(frames.RST_STREAM, 0, 1, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "settings of a stream": (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "settings of an odd length": (
        frame(frames.SETTINGS, 0, 0, bytes(7)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "acknowledged settings with settings": (
        frame(frames.SETTINGS, 1, 0, bytes(6)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "enable_push of 2": (frames.settings({2: 2}), ErrorCode.PROTOCOL_ERROR),
    "a window of 2^31": (frames.settings({4: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
    "a largest frame that is too small": (frames.settings({5: 16_383}), ErrorCode.PROTOCOL_ERROR),
    "a largest frame that is too large": (frames.settings({5: 1 << 24}), ErrorCode.PROTOCOL_ERROR),
    "push_promise": (frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "ping of a stream": (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "ping that is too short": (frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "goaway of a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "goaway that is too short": (frame(frames.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "window_update that is too short": (
        frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "window_update of an idle stream": (window_update(5, 1), ErrorCode.PROTOCOL_ERROR),
    "window_update by nothing": (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "a window beyond 2^31 - 1": (window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_connection_fault_ends_the_connection_with_its_code(fault: str) -> None:
    sent, code = FAULTS[fault]
    assert ended_with(Client().send(sent)) is code


def test_calls_of_a_connection_that_ends_are_given_up() -> None:
    client = Client()
    client.send(
        client.headers(1, path="/hold"),
        client.headers(3, path="/hold"),
        frame(frames.PUSH_PROMISE, 4, 1),
    )
    assert ended_with(client) is ErrorCode.PROTOCOL_ERROR
    assert [one.was_aborted for one in client.host.opened] == [True, True]
    assert client.host.open_now == 0


STREAM_FAULTS = {
    "priority that is too short": (
        frame(frames.PRIORITY, 0, 1, bytes(4)),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "priority on itself": (
        frame(frames.PRIORITY, 0, 1, (1).to_bytes(4) + b"\0"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "window_update by nothing": (window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "a window beyond 2^31 - 1": (window_update(1, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "data after the end": (data(1, b"", end_stream=True) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
}


@pytest.mark.parametrize("fault", STREAM_FAULTS)
def test_a_stream_fault_resets_its_stream_only(fault: str) -> None:
    sent, code = STREAM_FAULTS[fault]
    client = Client()
    client.send(client.headers(1, path="/hold"), sent)
    assert reset_with(client, 1) is code
    assert client.host.opened[0].was_aborted


MALFORMED = {
    "no path": [field for field in CALL if field[0] != ":path"],
    "an empty path": [(name, "" if name == ":path" else value) for name, value in CALL],
    "two paths": [*CALL[:3], CALL[2], *CALL[3:]],
    "an unknown pseudo-header": [(":protocol", "x"), *CALL],
    "a pseudo-header of answers": [(":status", "200"), *CALL],
    "a pseudo-header after a header": [*CALL, (":authority", "there")],
    "an upper-case name": [*CALL, ("Key", "v")],
    "a connection header": [*CALL, ("connection", "close")],
    "te that is not trailers": [*CALL[:5], ("te", "gzip")],
    "a line break in a value": [*CALL, ("key", "a\r\nb")],
    "binary metadata that is not base64": [*CALL, ("key-bin", "a")],
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_request_resets_its_stream_only(fault: str) -> None:
    client = Client()
    client.send(frame(frames.HEADERS, 5, 1, client.encoder.encode(MALFORMED[fault])))
    assert reset_with(client, 1) is ErrorCode.PROTOCOL_ERROR
    assert [one.number for one in client.host.opened] == [1001]


@pytest.mark.parametrize(
    ("changed", "status"), [((":method", "GET"), "405"), (("content-type", "text/html"), "415")]
)
def test_what_is_no_call_gets_an_http_status(changed: tuple[str, str], status: str) -> None:
    client = Client()
    fields = [changed if name == changed[0] else (name, value) for name, value in CALL]
    client.send(frame(frames.HEADERS, 5, 1, client.encoder.encode(fields)))
    assert client.answer(1)[0][":status"] == status


def test_padding_is_dropped_and_counted() -> None:
    client = Client()
    block = client.block()
    client.send(
        frame(frames.HEADERS, 0x4 | 0x8 | 0x20, 1, b"\x03" + PRIORITY_BYTES + block + bytes(3))
    )
    client.send(data(1, b"\x02" + message(b"hi") + bytes(2), flags=frames.PADDED, end_stream=True))
    assert client.answer(1)[1] == message(b"hi")
    assert client.connection._credit == (16 << 20) - len(message(b"hi")) - 3


def test_headers_may_be_continued() -> None:
    client = Client()
    block = client.block(("key", "v" * 100))
    client.send(frame(frames.HEADERS, frames.END_STREAM, 1, block[:10]))
    client.send(
        frame(frames.CONTINUATION, 0, 1, block[10:20]), frame(frames.CONTINUATION, 4, 1, block[20:])
    )
    assert dict(client.host.opened[0].head.invocation_metadata)["key"] == "v" * 100
    assert client.host.opened[0].remote_closed


def test_unknown_frames_settings_and_trailers_are_taken_as_nothing() -> None:
    client = Client()
    client.send(
        frame(0xEE, 0xFF, 1, b"?"),
        frames.settings({0xABCD: 1}),
        client.headers(1),
        data(1, message(b"x")),
    )
    client.send(frame(frames.HEADERS, 5, 1, client.encoder.encode([("checksum", "1")])))
    assert client.answer(1)[1] == message(b"x")


def test_headers_that_do_not_end_a_call_reset_it() -> None:
    client = Client()
    client.send(
        client.headers(1, path="/hold"),
        frame(frames.HEADERS, 4, 1, client.encoder.encode([("a", "b")])),
    )
    assert reset_with(client, 1) is ErrorCode.PROTOCOL_ERROR


def test_headers_of_a_closed_stream_end_the_connection() -> None:
    client = Client()
    client.send(client.call(5, b""), client.headers(3))
    assert ended_with(client) is ErrorCode.STREAM_CLOSED


def test_what_was_on_its_way_to_a_closed_stream_is_lost() -> None:
    client = Client()
    client.send(client.call(1, b""))
    client.take()
    client.send(data(1, b"late"), window_update(1, 5), frame(frames.RST_STREAM, 0, 1, bytes(4)))
    assert client.take() == []


@pytest.mark.parametrize("is_closed", [False, True])
def test_more_padding_than_frame_ends_the_connection_on_any_stream(is_closed: bool) -> None:
    client = Client()
    client.send(client.call(1, b"") if is_closed else client.headers(1, path="/hold"))
    client.take()
    client.send(data(1, b"\x05" + bytes(4), flags=frames.PADDED))
    assert ended_with(client) is ErrorCode.PROTOCOL_ERROR


def test_pings_are_answered_and_pongs_are_heard() -> None:
    client = Client()
    client.connection.ping()
    (ping,) = client.take()
    assert client.connection.awaiting_ping_ack
    client.send(
        frame(frames.PING, frames.ACK, 0, ping.payload), frame(frames.PING, 0, 0, b"12345678")
    )
    (pong,) = client.take()
    assert (pong.kind, pong.flags, pong.payload) == (frames.PING, frames.ACK, b"12345678")
    assert not client.connection.awaiting_ping_ack


def test_metadata_that_is_too_large_is_refused_and_its_block_still_counts() -> None:
    client = Client()
    client.send(
        client.headers(1, *((f"key-{number}", "v" * 100) for number in range(130)), end_stream=True)
    )
    assert client.answer(1)[0]["grpc-status"] == "8"
    assert client.send(client.call(3, b"next")).answer(3)[1] == message(b"next")


def test_a_header_block_without_end_ends_the_connection() -> None:
    client = Client()
    client.send(frame(frames.HEADERS, 0, 1, b"\x82"))
    client.send(*(frame(frames.CONTINUATION, 0, 1) for _ in range(100)))
    assert ended_with(client) is ErrorCode.ENHANCE_YOUR_CALM
    client = Client()
    client.send(frame(frames.HEADERS, 0, 1, b"\x82"))
    client.send(*(frame(frames.CONTINUATION, 0, 1, bytes(16_384)) for _ in range(5)))
    assert ended_with(client) is ErrorCode.ENHANCE_YOUR_CALM


FLOODS = {
    "pings": (frame(frames.PING, 0, 0, bytes(8)), 20),
    "settings": (frames.settings({}), 49),
    "empty data": (data(1, b""), 1000),
    "priorities": (frame(frames.PRIORITY, 0, 1, PRIORITY_BYTES), 1000),
    "unknown frames": (frame(0xEE, 0, 0), 1000),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_floods_end_the_connection_but_not_below_their_bound(flood: str) -> None:
    one, bound = FLOODS[flood]
    client = Client()
    client.send(client.headers(1, path="/hold"), one * bound)
    assert client.connection.failed is None
    client.send(one * 2)
    assert ended_with(client) is ErrorCode.ENHANCE_YOUR_CALM


def test_calls_opened_and_reset_without_end_are_a_flood() -> None:
    client = Client(bounds=Bounds(metadata_bytes=1 << 14, streams=10, pings=20, pings_per_s=1))
    for number in range(1, 50_000, 2):
        client.send(
            client.headers(number, path="/hold"), frame(frames.RST_STREAM, 0, number, bytes(4))
        )
        if client.connection.failed:
            break
    assert ended_with(client) is ErrorCode.ENHANCE_YOUR_CALM
    assert client.host.open_now == 0


def test_pings_between_answers_are_no_flood() -> None:
    client = Client()
    for number in range(1, 401, 2):
        client.send(client.call(number, b""), frame(frames.PING, 0, 0, bytes(8)))
    assert client.connection.failed is None


def test_pings_at_their_pace_are_no_flood() -> None:
    client = Client()
    for _ in range(200):
        client.now_s += 1
        client.send(frame(frames.PING, 0, 0, bytes(8)))
    assert client.connection.failed is None


def test_streams_beyond_the_bound_are_refused_for_another_try() -> None:
    client = Client(bounds=Bounds(metadata_bytes=1 << 14, streams=2, pings=20, pings_per_s=1))
    client.send(*(client.headers(number, path="/hold") for number in (1, 3, 5)))
    (refused,) = [one for one in client.take() if one.kind == frames.RST_STREAM]
    assert (refused.stream, refused.code) == (5, ErrorCode.REFUSED_STREAM)


def test_calls_the_host_refuses_are_told_why() -> None:
    client = Client(EchoHost(most=0))
    fields, _ = client.send(client.call(1, b"x")).answer(1)
    assert (fields["grpc-status"], fields["grpc-message"]) == ("8", "no more")
    client.host.most = 1
    assert client.send(client.call(3, b"x")).answer(3)[1] == message(b"x")


def test_draining_refuses_new_calls_and_ends_old_ones() -> None:
    client = Client()
    client.send(client.headers(1))
    client.connection.drain()
    (goaway,) = client.take()
    assert (goaway.kind, goaway.code) == (frames.GOAWAY, ErrorCode.NO_ERROR)
    client.send(client.headers(3))
    (refused,) = client.take()
    assert refused.code is ErrorCode.REFUSED_STREAM
    assert client.send(data(1, message(b"x"), end_stream=True)).answer(1)[1] == message(b"x")


def test_what_calls_hold_in_memory_is_bounded_over_all_of_them() -> None:
    client = Client(EchoHost(max_request_bytes=1000))
    client.send(client.headers(1), data(1, message(bytes(2000))[:900]), client.headers(3))
    fields, _ = client.send(data(3, message(bytes(2000))[:900])).answer(3)
    assert fields["grpc-status"] == "8"
    client.send(frame(frames.RST_STREAM, 0, 1, bytes(4)))
    assert client.host.request_bytes == 0


def test_somebody_is_woken_once_for_answers_given_later() -> None:
    client = Client()
    client.send(client.headers(1, path="/hold"), client.headers(3, path="/hold"))
    client.take()
    for one in client.host.opened:
        one.answer(b"now")
    assert client.woken == 1
    assert client.kinds().count(frames.DATA) == 2


def test_the_encoders_of_clients_may_use_every_form() -> None:
    plain, encoder = Client(), Encoder()
    for number, huffman in enumerate((True, False, True, False)):
        encoder.header_table_size = (0, 4096, 100, 4096)[number]
        block = encoder.encode(
            [*CALL, ("key", "välue"[number:].encode("ascii", "ignore"))], huffman=huffman
        )
        plain.send(frame(frames.HEADERS, 5, 2 * number + 1, block))
    assert len(plain.host.opened) == 4
    assert all(isinstance(one, Echo) for one in plain.host.opened)
    assert BOUNDS.streams == 100
