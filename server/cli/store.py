"""`tidemark store`: the transactional store."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.store.app import opened
from server.store.config import StoreConfig


def run(argv: Sequence[str]) -> int:
    """Run the daemon; returns its exit code."""
    return run_daemon(argv, "store", StoreConfig, opened)
