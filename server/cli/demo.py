"""`tidemark demo`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from server.config import add_flags, load
from server.daemon import EXIT_ERROR, EXIT_OK
from server.demo.run import DemoConfig, run_demo
from storage.model.errors import ours_alone


def run(argv: Sequence[str]) -> int:
    """Run the demo; 0 only if the lake was proved equal to the store."""
    parser = argparse.ArgumentParser(prog="tidemark demo", allow_abbrev=False)
    add_flags(parser, DemoConfig)
    flags = vars(parser.parse_args(list(argv)))
    config = load(DemoConfig, "demo", document={}, environ=os.environ, flags=flags)
    try:
        equal = asyncio.run(run_demo(config))
    except KeyboardInterrupt:
        return EXIT_OK if config.keep else EXIT_ERROR
    except BaseExceptionGroup as group:
        for line in dict.fromkeys(map(str, ours_alone(group))):
            print(line, file=sys.stderr)
        return EXIT_ERROR
    return EXIT_OK if equal else EXIT_ERROR
