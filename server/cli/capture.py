"""`tidemark capture`."""

from collections.abc import Sequence

from server.capture.daemon import CaptureConfig, open_capture
from server.cli.daemon import run_daemon


def run(argv: Sequence[str]) -> int:
    """Run a capture until SIGTERM; returns the exit code."""
    return run_daemon(argv, "capture", CaptureConfig, open_capture)
