"""`tidemark spark run` and `tidemark spark keep`."""

import sys
from collections.abc import Sequence

from server.cli.daemon import run_daemon
from server.daemon import EXIT_OK, EXIT_USAGE
from server.spark.config import SparkConfig
from server.spark.keep import KeepConfig, open_keep
from server.spark.run import open_run

_USAGE = """usage: tidemark spark run [--help] …    keep the lake of one changefeed current
       tidemark spark keep [--help] …   keep the lakes of all changefeeds current"""


def run(argv: Sequence[str]) -> int:
    """Run one of the Spark commands; returns the exit code."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return EXIT_OK
    if argv[:1] == ["keep"]:
        return run_daemon(argv[1:], "spark-keep", KeepConfig, open_keep, command="spark keep")
    if argv[:1] != ["run"]:
        print(_USAGE, file=sys.stderr)
        return EXIT_USAGE
    return run_daemon(argv[1:], "spark", SparkConfig, open_run, command="spark run")
