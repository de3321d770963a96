"""Fuzzing of a daemon's port: mutated HTTP/2 conversations,
and client certificates with mutated names.

The daemon is a real process of either engine. Whatever comes, it goes on: the same process answers
at the end, its memory has not grown without bound, and no connection of the native engine met an
unexpected exception.

    .venv/bin/python -m tests.fuzz.http2 frames --seconds 600 --seed 1
    .venv/bin/python -m tests.fuzz.http2 certificates --seconds 600 --engine grpcio
"""

import argparse
import random
import secrets
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from server.rpc.config import Engine
from server.rpc.http2 import frames
from server.rpc.http2.frames import frame
from tests.attacks import der
from tests.attacks.der import Authority
from tests.attacks.peer import Peer, data, message
from tests.attacks.target import Target, coordinator

_CHECK_EVERY_S = 5.0
_ANSWER_S = 0.01
_PATHS = ("/pdpb.PD/GetMembers", "/pdpb.PD/Tso", "/etcdserverpb.KV/Range", "/etcdserverpb.Watch/Watch",
          "/grpc.health.v1.Health/Watch", "/no.Service/Method", "*", "", "/" * 100, "/pdpb.PD/\u00e9")  # fmt: skip
_ODD_FIELDS = (("te", "trailers"), ("grpc-timeout", "1n"), ("grpc-timeout", "99999999H"), ("grpc-encoding", "gzip"),
               ("grpc-encoding", "x" * 300), ("x-bin", "===="), ("x-bin", "AAAA"), ("connection", "close"),
               (":path", "/twice"), ("content-length", "-1"), ("x", "\n"), ("X", "upper"), ("x", "y" * 20_000),
               ("content-type", "text/html"))  # fmt: skip
_NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    255,
    65_535,
    65_536,
    (1 << 24) - 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)
_KINDS = (UTF8, T61, IA5, BMP, UNIVERSAL, PRINTABLE) = (0x0C, 0x14, 0x16, 0x1E, 0x1C, 0x13)
_TEXTS = (
    b"",
    b"a",
    b"\0",
    b"\xff\xfe",
    "Zo\u00eb".encode(),
    "\u2603".encode("utf-16-be"),
    b"x" * 64,
    b"a\0b",
    b"\n",
    b"\xc3",
)

NAMES_UNREAD = "UnicodeDecodeError"
"""In the log where Python's `ssl` module could not read a certificate's names:
the one exception that is expected.
"""


class Outcome(NamedTuple):
    """What a run saw."""

    tried: int
    answered: int
    """Of calls with mutated certificates; frames are not judged by their answers."""
    errors: float
    """Connections of the native engine that an unexpected exception ended; each is a defect."""
    grown_mib: float
    log: str


def fuzz_frames(target: Target, *, seconds: float, seed: int) -> Outcome:
    """Conversations of one connection each."""
    return _until(target, seconds, seed, _conversation)


def fuzz_certificates(target: Target, *, seconds: float, seed: int) -> Outcome:
    """Handshakes and one call each."""
    return _until(target, seconds, seed, _handshake)


def _until(
    target: Target, seconds: float, seed: int, attempt: Callable[[Target, random.Random], bool]
) -> Outcome:
    chance = random.Random(seed)
    tried = answered = 0
    target.check_alive()
    before = target.rss_mib
    end_s = time.monotonic() + seconds
    checked_s = time.monotonic()
    while time.monotonic() < end_s:
        with suppress(OSError):
            answered += attempt(target, chance)
        tried += 1
        if time.monotonic() - checked_s > _CHECK_EVERY_S:
            target.check_alive()
            checked_s = time.monotonic()
    target.check_alive()
    errors = target.metric("tidemark_rpc_connection_errors_total")
    return Outcome(tried, answered, errors, target.rss_mib - before, target.log)


def _conversation(target: Target, chance: random.Random) -> bool:
    with Peer(target, seconds=5) as peer:
        peer.socket.settimeout(_ANSWER_S)
        raw = conversation(peer, chance)
        if chance.random() < 0.5:
            raw = mutated(raw, chance)
        cut = chance.choice((1 << 20, 1 << 20, 100, 9, 1)) if len(raw) < 2000 else 1 << 20
        for at in range(0, len(raw), cut):
            peer.send(raw[at : at + cut])
        if chance.random() < 0.3:
            peer.socket.shutdown(socket.SHUT_WR)
        if chance.random() < 0.7:
            with suppress(OSError):
                peer.socket.recv(1 << 16)
    return False


def conversation(peer: Peer, chance: random.Random) -> bytes:
    """What a client might say, mostly in order."""
    parts = [
        frames.PREFACE,
        frames.settings({chance.choice((1, 2, 3, 4, 5, 6, 77)): chance.choice(_NUMBERS)}),
    ]
    if chance.random() < 0.7:
        parts[1] = frames.settings({})
    parts += [chance.choice(_STEPS)(peer, chance) for _ in range(chance.choice((1, 3, 10, 40)))]
    if chance.random() < 0.1:
        chance.shuffle(parts)
    return b"".join(parts)


def _call(peer: Peer, chance: random.Random) -> bytes:
    more = [chance.choice(_ODD_FIELDS) for _ in range(chance.choice((0, 0, 0, 1, 3)))]
    begun = peer.headers(chance.choice(_PATHS), *more, end_headers=chance.random() < 0.9)
    body = chance.randbytes(chance.choice((0, 1, 5, 100)))
    sent = data(
        peer.stream,
        message(body, compressed=chance.random() < 0.2),
        end_stream=chance.random() < 0.8,
    )
    return begun + sent


def _any_frame(peer: Peer, chance: random.Random) -> bytes:
    stream = chance.choice((0, peer.stream, peer.stream + 2, 1, 2, frames.MAX_WINDOW, 1 << 31))
    payload = chance.choice(
        (b"", bytes(4), bytes(8), chance.choice(_NUMBERS).to_bytes(4), chance.randbytes(20))
    )
    return frame(chance.randrange(12), chance.randrange(256), max(0, stream), payload)


def _window(peer: Peer, chance: random.Random) -> bytes:
    return frames.window_update(chance.choice((0, max(1, peer.stream))), chance.choice(_NUMBERS))


def _reset(peer: Peer, chance: random.Random) -> bytes:
    return frame(frames.RST_STREAM, 0, max(1, peer.stream), chance.choice(_NUMBERS).to_bytes(4))


_STEPS = (_call, _call, _call, _any_frame, _window, _reset)


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, left out, or doubled."""
    changed = bytearray(raw)
    for _ in range(chance.choice((1, 1, 3, 10))):
        at = chance.randrange(len(changed) + 1)
        how = chance.randrange(3)
        if how == 0:
            changed[at : at + 1] = chance.randbytes(1)
        elif how == 1:
            del changed[at : at + chance.choice((1, 9, 50))]
        else:
            changed[at:at] = changed[at : at + chance.choice((1, 9, 200))]
    return bytes(changed)


def _handshake(target: Target, chance: random.Random) -> bool:
    assert target.authority is not None
    certificate = odd_certificate(target.authority, chance)
    with suppress(ssl.SSLError), Peer(target, certificate, seconds=5) as peer:
        return peer.introduce().call(target.method) == "0"
    return False


def odd_certificate(authority: Authority, chance: random.Random) -> bytes:
    """Names of all kinds, right or wrong."""
    subject = _name(chance)
    if chance.random() < 0.3:
        return authority.client(subject, raw_names=mutated(der.der(0x30, *_names(chance)), chance))
    return authority.client(subject, _names(chance))


def _names(chance: random.Random) -> list[bytes]:
    return [_general_name(chance) for _ in range(chance.choice((0, 1, 1, 3, 30)))]


def _general_name(chance: random.Random) -> bytes:
    text = chance.choice(_TEXTS)
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: der.dns(text),
        lambda: der.mail(text),
        lambda: der.uri(text),
        lambda: der.address(chance.randbytes(chance.choice((0, 3, 4, 8, 16, 32)))),
        lambda: der.directory(_name(chance)),
        lambda: der.registered("1.2.840.113549"),
        lambda: der.other("1.3.6.1.4.1.311.20.2.3", der.der(chance.choice(_KINDS), text)),
        lambda: der.der(
            chance.choice((0xA3, 0xA5, 0x82, 0x80, 0x9F)), chance.randbytes(chance.randrange(9))
        ),
    )
    return chance.choice(makers)()


def _name(chance: random.Random) -> bytes:
    kinds = (der.COMMON_NAME, der.ORGANIZATION, der.COUNTRY, "1.2.3.4", "2.5.4.3")
    count = chance.choice((0, 1, 1, 2, 20))
    return der.name(
        *(
            (chance.choice(kinds), chance.choice(_KINDS), chance.choice(_TEXTS))
            for _ in range(count)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=("frames", "certificates"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--engine", choices=("native", "grpcio"), default="native")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        authority = Authority(path) if arguments.subject == "certificates" else None
        fuzz = fuzz_certificates if authority else fuzz_frames
        with coordinator(path, Engine(arguments.engine), authority) as target:
            outcome = fuzz(target, seconds=arguments.seconds, seed=arguments.seed)
    print(
        f"tried {outcome.tried}, answered {outcome.answered}, errors {outcome.errors}, RSS "
        f"+{outcome.grown_mib:.0f} MiB"
    )
    if outcome.errors > outcome.log.count(NAMES_UNREAD):
        print(outcome.log[-5000:])
        sys.exit(1)


if __name__ == "__main__":
    main()
