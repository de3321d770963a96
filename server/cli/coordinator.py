"""`tidemark coordinator`: PD's and etcd's services on one port."""

from collections.abc import Sequence
from functools import partial

from server.cli.daemon import run_daemon
from server.coordinator.daemon import CoordinatorConfig, open_coordinator
from server.routes import Routes


def run(argv: Sequence[str]) -> int:
    """Run the daemon until SIGTERM."""
    routes = Routes()
    return run_daemon(argv, "coordinator", CoordinatorConfig, partial(open_coordinator, routes=routes), routes=routes)
