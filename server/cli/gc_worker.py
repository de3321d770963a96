"""`tidemark gc-worker`: resolve locks, delete ranges, do GC."""

from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.gc_worker.daemon import GCWorkerConfig, open_gc_worker


def run(argv: Sequence[str]) -> int:
    """Run the GC worker until SIGTERM."""
    return run_daemon(argv, "gc-worker", GCWorkerConfig, open_gc_worker)
