"""`tidemark play`."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

import grpc.aio

from server.cli.parser import Parser
from server.config import add_flags, load
from server.exit_status import EXIT_ERROR, EXIT_OK
from server.play.playground import PlayConfig, play
from storage.model.errors import TidemarkError, leaves


def run(argv: Sequence[str]) -> int:
    """Run the playground until Ctrl-C or SIGTERM, which are its good end; returns the exit code."""
    flags = vars(play_parser().parse_args(list(argv)))
    config = load(PlayConfig, "play", document={}, environ=os.environ, flags=flags)
    status = EXIT_OK
    try:
        asyncio.run(_until_signal(config))
    except* TidemarkError as ours:
        status = EXIT_ERROR
        print(*dict.fromkeys(map(str, leaves(ours))), sep="\n", file=sys.stderr)
    except* grpc.aio.AioRpcError as theirs:
        status = EXIT_ERROR
        print(*dict.fromkeys(_details(theirs)), sep="\n", file=sys.stderr)
    return status


def play_parser() -> Parser:
    """The flags of `tidemark play`."""
    parser = Parser(prog="tidemark play")
    add_flags(parser, PlayConfig)
    return parser


async def _until_signal(config: PlayConfig) -> None:
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await play(config)


def _details(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> Iterator[str]:
    for err in group.exceptions:
        yield from _details(err) if isinstance(err, BaseExceptionGroup) else [str(err.details())]
