"""`tidemark coordinator`: PD's and etcd's services on one port."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.coordinator.config import CoordinatorConfig
from server.coordinator.daemon import opened


def run(argv: Sequence[str]) -> int:
    """Run the daemon until SIGTERM."""
    return run_daemon(argv, "coordinator", CoordinatorConfig, opened)
