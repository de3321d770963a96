"""`--watch`: show a command's output again and again."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from server.cli.arguments import seconds
from server.cli.output import Output

_EVERY_S: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J"
"""Home, and clear the screen."""


def add_watch(verb: argparse.ArgumentParser) -> None:
    """Add the flag."""
    verb.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=_EVERY_S,
        metavar="SECONDS",
        help=f"show it again and again (every {_EVERY_S:g} s), until Ctrl-C",
    )


async def shown_again(
    every_s: float, ask: Callable[[], Awaitable[Output]], show: Callable[[Output], None]
) -> None:
    """Until cancelled; a terminal shows the newest output only. Raises what `ask` raises."""
    while True:
        output = await ask()
        if sys.stdout.isatty():
            sys.stdout.write(_CLEAR)
        show(output)
        sys.stdout.flush()
        await asyncio.sleep(every_s)
