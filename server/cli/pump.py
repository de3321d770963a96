"""`tidemark pump`: receive, match and serve TiDB binlogs."""

from collections.abc import Sequence
from functools import partial

from server.cli.daemon import run_daemon
from server.pump.app import opened
from server.pump.config import PumpConfig
from server.routes import Routes


def run(argv: Sequence[str]) -> int:
    """Run the pump until SIGTERM."""
    routes = Routes()
    return run_daemon(argv, "pump", PumpConfig, partial(opened, routes=routes), routes=routes)
