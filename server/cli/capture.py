"""`tidemark capture`; it starts `tidemark capture worker` by itself when it has workers."""

from collections.abc import Sequence

from server.capture.daemon import CaptureConfig, open_capture
from server.capture.worker.metrics import REGISTRY
from server.capture.worker.process import WorkerConfig, open_worker
from server.cli.daemon import run_daemon


def run(argv: Sequence[str]) -> int:
    """Run a capture, or one of its workers, until SIGTERM; returns the exit code."""
    if argv[:1] == ["worker"]:
        return run_daemon(argv[1:], "worker", WorkerConfig, open_worker)
    return run_daemon(argv, "capture", CaptureConfig, open_capture, registry=REGISTRY)
