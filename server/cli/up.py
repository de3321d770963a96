"""`tidemark up`."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.up.metrics import REGISTRY
from server.up.tree import UpConfig, open_tree


def run(argv: Sequence[str]) -> int:
    """Start all daemons and keep them until SIGTERM; returns the exit code."""
    return run_daemon(argv, "up", UpConfig, open_tree, registry=REGISTRY)
