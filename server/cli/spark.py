"""`tidemark spark run`."""

import sys
from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.daemon import EXIT_OK, EXIT_USAGE
from server.spark.config import SparkConfig
from server.spark.run import open_run

_USAGE = "usage: tidemark spark run [--help] …   keep the lake of one changefeed current"


def run(argv: Sequence[str]) -> int:
    """Run one of the Spark commands; returns the exit code."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return EXIT_OK
    if argv[:1] != ["run"]:
        print(_USAGE, file=sys.stderr)
        return EXIT_USAGE
    arguments = [part for flag in argv[1:] for part in ((flag, "true") if flag == "--once" else (flag,))]
    return run_daemon(arguments, "spark", SparkConfig, open_run)
