"""`tidemark pump`: receive, match and serve TiDB binlogs."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.pump.app import opened
from server.pump.config import PumpConfig


def run(argv: Sequence[str]) -> int:
    """Run the pump until SIGTERM."""
    return run_daemon(argv, "pump", PumpConfig, opened)
