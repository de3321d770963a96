"""`tidemark up`."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.up.metrics import REGISTRY
from server.up.tree import UpConfig, open_tree


def run(argv: Sequence[str]) -> int:
    """Start all daemons and keep them until SIGTERM; returns the exit code."""
    arguments = [part for flag in argv for part in (("--spark", "false") if flag == "--no-spark" else (flag,))]
    return run_daemon(arguments, "up", UpConfig, open_tree, registry=REGISTRY)
