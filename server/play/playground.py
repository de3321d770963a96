"""The playground from end to end: MariaDB, all daemons, a changefeed with its first copy, commands
to try, and a Spark SQL shell over the lake's tables.
"""

import asyncio
import contextlib
import shlex
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import grpc.aio
from pyspark_tidemark.jars import default_directory, install
from pyspark_tidemark.java import LOG_ERRORS_ONLY
from tidemarkpb.v1 import changefeed_pb2, dump_pb2
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.config import setting
from server.demo.cluster import json_line, open_process, path_from_here
from server.play.mariadb import PASSWORD, USER, MariaDb
from server.rpc.client import connect
from server.spark.config import require_java
from storage.model.errors import UnavailableError
from storage.model.ts import physical_ms
from storage.tasks import background_tasks

CHANGEFEED = "shop"
TABLES = ("shop.customers", "shop.products", "shop.orders")
_ORDERS = "SELECT status, count(*), sum(quantity) FROM shop.orders GROUP BY status"
_PRODUCTS = "SELECT * FROM shop.products"
_DOUBLE = "UPDATE shop.products SET price = price * 2"
_RPC_SECONDS = 30.0
_SECOND = 1.0
_SETTINGS = {
    "spark.master": "local[1]",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    # For a few thousand rows more partitions cost more than they save.
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
# Set after the tables are created: statements without rows would print a header, too.
_HEADERS = "SET spark.sql.cli.print.header=true;\n"
_NO_ANSWER = r"!printf \033[2A\033[J;" + "\n"
"""Removes the two lines from a terminal that SET answers with."""
_SHELL = """\
#!/bin/bash
# A Spark SQL shell over the lake; -e 'STATEMENT' and -f FILE as of spark-sql. It leaves out what the JVM
# says at its start, and the times of the statements that make the tables known.
set -o pipefail
export PYSPARK_PYTHON={python} SPARK_CONF_DIR={conf}
errors() {{ trap '' INT; exec grep --line-buffered -vE '^(Time taken: |WARNING: Using incubator modules)' >&2; }}
shell() {{ {program} -S -i "$@"; }}

if [ $# -eq 0 ] && [ -t 1 ]; then
  echo "Spark starts, which takes half a minute. Try: SHOW TABLES IN shop;   and to end: exit;" >&2
  shell {terminal} 2> >(errors)
elif [ $# -eq 0 ]; then
  shell {tables} 2> >(errors)
else
  shell {tables} "$@" 2> >(errors) | sed '1,/^spark.sql.cli.print.header\ttrue$/d'
fi
"""


class ChangefeedStoppedError(UnavailableError):
    """The playground's changefeed has stopped; the message says why."""

    code = "ErrPlayStopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayConfig:
    """Configuration of the playground: its directory and its duration."""

    data_dir: str = setting(
        "./data/play", "directory for MariaDB, the daemons, the lake and the logs"
    )
    mariadb_port: int = setting(3316, "MariaDB's port on 127.0.0.1", least=1)
    any_ports: bool = setting(
        default=False, help_text="the daemons listen on free ports instead of the default ones"
    )
    seconds: float = setting(
        0.0, "end so long after the lake has the first copy, in seconds; 0: at Ctrl-C"
    )

    @property
    def directory(self) -> Path:
        """The data directory, absolute; created, with the one for logs in it,
        if it is not there.
        """
        directory = Path(self.data_dir).resolve()
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        return directory


class Progress:
    """Prints a line of progress each second."""

    def __init__(self, now: str) -> None:
        self.now = now
        self._began = time.monotonic()

    async def run(self) -> None:
        """Print until cancelled; on a terminal the line overwrites itself."""
        end = "\033[K\r" if sys.stdout.isatty() else "\n"
        while True:
            print(f"[{time.monotonic() - self._began:5.1f} s] {self.now}", end=end, flush=True)
            await asyncio.sleep(_SECOND)


async def play(config: PlayConfig) -> None:
    """Start everything, print commands to try once the lake has the shop, and run until cancelled.

    Raises:
        JavaMissingError: there is no Java.
        MariaDbError: there is no MariaDB, or it does not run.
        ProcessFailedError: the daemons ended.
        ChangefeedStoppedError: the changefeed or its job failed.
    """
    require_java()
    data = config.directory
    logs = data / "logs"
    progress = Progress("starting MariaDB")
    async with (
        background_tasks(progress.run()),
        MariaDb.running(data / "mariadb", config.mariadb_port, logs / "mariadb.log") as server,
    ):
        progress.now = "starting Tidemark's daemons (tidemark up)"
        async with (
            _daemons(config, data) as endpoints,
            connect(endpoints["capture"]) as channel,
            background_tasks(_trade(server)),
        ):
            try:
                await _play(
                    Playground(channel, data, server, progress),
                    config,
                    hints(data, config, endpoints),
                )
            finally:
                progress.now = "ending the daemons, the Spark job and MariaDB"


async def _play(playground: "Playground", config: PlayConfig, advice: str) -> None:
    await playground.copy()
    print(f"\n\n{advice}\n", flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.seconds or None):
            await playground.follow()


class Playground:
    """The changefeed of the shop, and its lake."""

    def __init__(
        self, channel: grpc.aio.Channel, data: Path, server: MariaDb, progress: Progress
    ) -> None:
        self._changefeeds = ChangefeedServiceStub(channel)
        self._dumps = DumpServiceStub(channel)
        self._data = data
        self._server = server
        self._progress = progress

    async def copy(self) -> None:
        """Create the changefeed and begin the first copy, unless an earlier run did;
        wait until the lake has it.
        """
        listed = await self._changefeeds.ListChangefeeds(
            changefeed_pb2.ListChangefeedsRequest(), timeout=_RPC_SECONDS
        )
        if not any(feed.id == CHANGEFEED for feed in listed.changefeeds):
            await self._create()
        while (dump := await self._dump()).state != "finished":
            self._progress.now = (
                f"first copy: {dump.tables_done} of {dump.tables_known} tables, {dump.rows_done} "
                f"rows in the lake ({self._waits_for(await self._feed())})"
            )
            await asyncio.sleep(_SECOND)
        # The dump is at the target, but orders went on meanwhile: wait until the lake is as new as
        # this moment.
        now_ms = time.time() * 1000
        while physical_ms((feed := await self._feed()).checkpoint_ts) < now_ms:
            await self._show(feed)
        await asyncio.to_thread(write_shell, self._data / "sql", self._data / "lake", TABLES)

    async def follow(self) -> None:
        """Show how far the lake is, until cancelled; goes on where the changefeed has failed, as
        whoever plays may have broken something to see what happens, and can mend it.
        """
        while True:
            feed = await self._query()
            if feed.state == changefeed_pb2.CHANGEFEED_STATE_FAILED:
                self._progress.now = (
                    f"the changefeed has failed with {feed.error.code}: `tidemark cli changefeed "
                    f"query -c {CHANGEFEED}` says why; `… resume -c {CHANGEFEED}` starts it again"
                )
                await asyncio.sleep(_SECOND)
            else:
                await self._show(feed)

    async def _create(self) -> None:
        self._progress.now = "creating the changefeed"
        password = self._data / "password"
        # Its mode is set before the password is in it: nobody else can read it in between.
        password.touch(mode=0o600)
        password.write_text(PASSWORD, encoding="utf-8")
        request = changefeed_pb2.CreateChangefeedRequest(
            id=CHANGEFEED,
            source_uri=f"mysql://{USER}@127.0.0.1:{self._server.port}?password-file={quote(str(password))}",
            sink_uri=f"delta://{self._data / 'lake'}",
            filter=["shop.*"],
        )
        await self._changefeeds.CreateChangefeed(request, timeout=_RPC_SECONDS)

    async def _dump(self) -> dump_pb2.Dump:
        """Return the progress of the first copy; start it if it was not started."""
        try:
            request = dump_pb2.GetDumpStatusRequest(changefeed_id=CHANGEFEED)
            return (await self._dumps.GetDumpStatus(request, timeout=_RPC_SECONDS)).dump
        except grpc.aio.AioRpcError as err:
            if err.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        start = dump_pb2.StartDumpRequest(changefeed_id=CHANGEFEED)
        return (await self._dumps.StartDump(start, timeout=_RPC_SECONDS)).dump

    async def _query(self) -> changefeed_pb2.Changefeed:
        request = changefeed_pb2.QueryChangefeedRequest(id=CHANGEFEED)
        return (await self._changefeeds.QueryChangefeed(request, timeout=_RPC_SECONDS)).changefeed

    async def _feed(self) -> changefeed_pb2.Changefeed:
        feed = await self._query()
        if feed.state == changefeed_pb2.CHANGEFEED_STATE_FAILED:
            raise ChangefeedStoppedError(
                f"{feed.error.code}: {feed.error.message}; see {self._data / 'logs'}"
            )
        return feed

    def _waits_for(self, feed: changefeed_pb2.Changefeed) -> str:
        """Why a copy takes its time."""
        if not feed.error.code:
            return "Spark needs a while to start"
        return f"{feed.error.code}: it is tried again; see {self._data / 'logs'}"

    async def _show(self, feed: changefeed_pb2.Changefeed) -> None:
        [(orders,)] = await self._server.ask("SELECT count(*) FROM shop.orders")
        lag_s = time.time() - physical_ms(feed.checkpoint_ts) / 1000
        starting = "" if feed.HasField("lake_job") else "; its Spark job is starting"
        self._progress.now = (
            f"orders in MariaDB {orders}; the lake is {lag_s:.1f} s behind{starting}"
        )
        await asyncio.sleep(_SECOND)


@asynccontextmanager
async def _daemons(config: PlayConfig, data: Path) -> AsyncIterator[dict[str, str]]:
    """`tidemark up` for the block, with its Spark jobs; where its daemons listen."""
    names = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")
    ports = (
        [part for name in names for part in (f"--{name}-addr", "127.0.0.1:0")]
        if config.any_ports
        else []
    )
    log = data / "logs" / "daemons.log"
    arguments = ["up", "--follow-parent", "--data-dir", str(data / "daemons"), *ports]
    async with open_process("server.cli.main", arguments, log) as process:
        ready = await json_line(process, log)
        async with background_tasks(_watch(process, log)):
            yield ready["endpoints"]


async def _watch(process: Process, log: Path) -> None:
    """Raise ProcessFailedError when the daemons end."""
    while True:
        await json_line(process, log)


async def _trade(server: MariaDb) -> None:
    while True:
        await server.one_second_of_the_shop()
        await asyncio.sleep(_SECOND)


def hints(data: Path, config: PlayConfig, endpoints: Mapping[str, str]) -> str:
    """Commands to try, ready to be pasted in this directory."""
    sql, tidemark = (
        path_from_here(data / "sql"),
        path_from_here(Path(sys.executable).parent / "tidemark"),
    )
    # With the default ports the commands are as short as they can be.
    where = f" --server {endpoints['capture']} --pd {endpoints['coordinator']}"
    cli = f"{tidemark} cli{where if config.any_ports else ''}"
    return f"""The lake has the shop and follows it. In another terminal, try:

  {sql} -e "{_ORDERS}"
  mariadb -h 127.0.0.1 -P {config.mariadb_port} -u root -e "{_DOUBLE}"
  {sql} -e "{_PRODUCTS}"
  {sql}        # a Spark SQL shell over the lake: shop.customers, shop.products, shop.orders
  {cli} changefeed query -c {CHANGEFEED}
  {cli} doctor     # what is slow or stuck, and what helps
  {cli} verify -c {CHANGEFEED}

The last one compares the lake with MariaDB at one cut. The tables are Delta tables in {path_from_here(data / "lake")}.
A browser shows how the changefeed is, at http://{endpoints["capture"]}/.
Ctrl-C ends everything. The data stay, and the next run goes on from there."""


def write_shell(script: Path, lake: Path, tables: Iterable[str]) -> None:
    """Write the script, and beside it the directory `spark` with its settings;
    `tables` are `database.table`.

    Raises:
        SourceError: ErrJavaNotFound, ErrJarsUnavailable.
    """
    spark = script.parent / "spark"
    spark.mkdir(exist_ok=True)
    jars = ",".join(map(str, install(default_directory(), "delta")))
    settings = _SETTINGS | {"spark.jars": jars, "spark.sql.warehouse.dir": str(spark / "warehouse")}
    lines = "".join(f"{name} {value}\n" for name, value in settings.items())
    (spark / "spark-defaults.conf").write_text(lines, encoding="utf-8")
    (spark / "log4j2.properties").write_text(LOG_ERRORS_ONLY, encoding="utf-8")
    statements = "".join([*_statements(lake, tables), _HEADERS])
    (spark / "tables.sql").write_text(statements, encoding="utf-8")
    (spark / "terminal.sql").write_text(statements + _NO_ANSWER, encoding="utf-8")
    script.write_text(
        _SHELL.format(
            python=shlex.quote(sys.executable),
            conf=shlex.quote(str(spark)),
            program=shlex.quote(str(Path(sys.executable).parent / "spark-sql")),
            tables=shlex.quote(str(spark / "tables.sql")),
            terminal=shlex.quote(str(spark / "terminal.sql")),
        ),
        encoding="utf-8",
    )
    script.chmod(0o755)


def _statements(lake: Path, tables: Iterable[str]) -> Iterable[str]:
    for name in tables:
        schema, table = name.split(".")
        place = str(lake / schema / table).replace("'", "\\'")
        yield (
            f"CREATE DATABASE IF NOT EXISTS {schema};\nCREATE TABLE {name} USING delta LOCATION "
            f"'{place}';\n"
        )
