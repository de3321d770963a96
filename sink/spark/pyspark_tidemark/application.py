"""One Spark application for several lake jobs: `python -m pyspark_tidemark.application`.

`tidemark spark keep` starts it. It holds the JVM and the Spark context. Each job is a process of
its own, which connects by a gateway of its own (py4j) and has a session of its own. So a job that
fails ends no other one, while the JVM, its classes and Spark's threads are there once.

It writes `{"ready": true}` when Spark has started. For each line `{"changefeed": …}` on standard
input it opens a gateway and answers `{"port", "secret"}`; for `{"changefeed": …, "ended": true}` it
closes that one and answers `{"closed"}`, whether there was one. It ends when standard input does.
"""

import argparse
import json
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jars import default_directory, install_some, present
from pyspark_tidemark.java import check_java
from pyspark_tidemark.lake.failure import cause_of, named
from pyspark_tidemark.lake.registry import find_format
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.output import own_output, write_line

PORT: Final = "PYSPARK_GATEWAY_PORT"
"""Where PySpark looks for a JVM that runs already, with PYSPARK_GATEWAY_SECRET."""
EXIT_ERROR: Final = 1
_CONNECT_S: Final = 10.0
_SETTINGS: Final = {
    # A compaction of one lake must not hold up the small cuts of others.
    "spark.scheduler.mode": "FAIR",
}


def is_attached() -> bool:
    """Whether this process was given a gateway to an application; else it starts a Spark of its
    own.
    """
    return PORT in os.environ


def is_lost() -> bool:
    """Whether the application that this process was given a gateway to is gone."""
    if not is_attached():
        return False
    try:
        with socket.create_connection(("127.0.0.1", int(os.environ[PORT])), _CONNECT_S):
            return False
    except OSError:
        return True


def attached_session(lake: str) -> SparkSession:
    """A new session in the application that this process was given a gateway to.

    Raises:
        SourceError: ErrJarsUnavailable, it has no jars of the format `lake`; ErrSparkStart, it is
            gone.
    """
    if find_format(lake).jars is not None and not present(default_directory(), lake):
        raise SourceError(
            "ErrJarsUnavailable",
            f"the jars of {lake} could not be fetched: install them by `python -m "
            f"pyspark_tidemark.jars {lake}`, then restart `tidemark spark keep`",
        )
    try:
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        jvm: Any = gateway.jvm
        context = jvm.org.apache.spark.api.java.JavaSparkContext.fromSparkContext(
            jvm.org.apache.spark.SparkContext.getOrCreate()
        )
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - as PySpark's shell does
        ours = SparkContext(
            gateway=gateway, jsc=context, conf=SparkConf(_jvm=jvm, _jconf=context.getConf())
        )
        # A session of its own: its temporary views and settings are nobody else's.
        sessions = jvm.org.apache.spark.sql.classic.SparkSession
        first = sessions.builder().sparkContext(context.sc()).getOrCreate()
        return SparkSession(ours, first.newSession())
    except (PySparkException, Py4JError, OSError) as err:
        raise SourceError(
            "ErrSparkStart", f"the application of all jobs is gone: {cause_of(err)}", retryable=True
        ) from err


def close_session(spark: SparkSession) -> None:
    """End a job's session: with its JVM, or with its gateway to an application of several jobs."""
    if is_attached():
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - PySpark stops contexts only
        gateway.shutdown()
        # What fails from here on does not fail because the gateway is closed: see `is_lost`.
        del os.environ[PORT]
    else:
        spark.stop()


class Gateways:
    """The gateways of one application, by changefeed."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._servers: dict[str, Any] = {}

    def open_gateway(self, changefeed: str) -> dict[str, Any]:
        """Open a gateway for a changefeed's job, and close that of its earlier job."""
        self.close(changefeed)
        jvm: Any = self._spark._jvm  # noqa: SLF001 - PySpark has no call for it
        conf = self._spark.sparkContext._jsc.sc().conf()  # noqa: SLF001
        server = jvm.org.apache.spark.api.python.Py4JServer(conf)
        server.start()
        self._servers[changefeed] = server
        return {"port": server.getListeningPort(), "secret": server.secret()}

    def close(self, changefeed: str) -> bool:
        """Close the gateway of a changefeed; False: it has none."""
        server = self._servers.pop(changefeed, None)
        if server is not None:
            server.shutdown()
        return server is not None


def main(argv: Sequence[str]) -> int:
    """Run the application until standard input ends; returns the exit code."""
    given = _parser().parse_args(list(argv))
    out = own_output()
    try:
        check_java()
        install_some(default_directory(), given.format)
        spark = open_session(
            master=given.master,
            driver_memory=given.driver_memory,
            directory=given.directory,
            lake="",
            extra=_SETTINGS | dict(text.split("=", 1) for text in given.conf),
        )
        serve(Gateways(spark), sys.stdin, out)
    except Exception as err:  # noqa: BLE001 - whatever it is, the application ends with a code
        if not isinstance(err, SourceError) or err.__cause__ is not None:
            traceback.print_exc()
        sys.stderr.write(f"{named(err)}\n")
        return EXIT_ERROR
    return 0


def serve(gateways: Gateways, requests: IO[str], out: IO[str]) -> None:
    """Answer requests, one a line, until their input ends."""
    write_line(out, {"ready": True})
    for line in requests:
        document: dict[str, Any] = json.loads(line)
        changefeed = str(document["changefeed"])
        if document.get("ended"):
            write_line(out, {"closed": gateways.close(changefeed)})
        else:
            write_line(out, gateways.open_gateway(changefeed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_tidemark.application", allow_abbrev=False, description=__doc__
    )
    add = parser.add_argument
    add("--master", required=True)
    add("--driver-memory", required=True)
    add("--directory", required=True, type=Path, help="for what Spark spills")
    add("--format", action="append", default=[], help="a format whose jars are fetched if missing")
    add("--conf", action="append", default=[], metavar="NAME=VALUE")
    return parser


if __name__ == "__main__":
    sys.path[:] = [
        entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent
    ]
    sys.exit(main(sys.argv[1:]))
