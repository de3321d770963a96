"""The demo's lake: where it lies, the changefeed that feeds it, how far its Spark job has come, and
the proof that it is equal to the store.

The demo starts the job itself and follows the lines that it prints (`LakeJob`). With `tidemark demo
--join` somebody else runs it, and the changefeed's checkpoint tells how far it is (`JoinedLake`).

`prove` compares at the newest cut what Spark reads from the lake (`LakeReader`) with what a foreign
client reads from the store. The two sides share no code of ours but the bank itself: the lake is
read by Spark, the store by the client at exactly the cut's timestamp, and rows are compared as
plain tuples.
"""

import asyncio
import contextlib
import tempfile
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import UPSERT
from pyspark_tidemark.lake.registry import FORMATS as LAKE_FORMATS
from pyspark_tidemark.sink_uri import SinkUri
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.config import ConfigError
from server.demo import bank as tables
from server.demo.bank import Bank
from server.demo.client import BankClient
from server.demo.cluster import json_line, open_process
from server.rpc.client import connect
from storage.model.errors import InvalidError, UnavailableError

CHANGEFEED = "bank"
FORMATS = tuple(name for name, record in LAKE_FORMATS.items() if record.is_directory)
_CHOICES = (
    "--lake is delta, iceberg or parquet, or a PostgreSQL database of yours, as in --lake "
    "'postgresql://user@host:5432/database?password-file=/path'"
)
_POLL_SECONDS = 0.5
_RPC_SECONDS = 30.0
Row = tuple[object, ...]
_SHOWN = 5


class LakeUnavailableError(UnavailableError):
    """The database for the demo's tables cannot be used."""

    code = "ErrLakeUnavailable"


class OtherLakeError(InvalidError):
    """The changefeed of this data directory belongs to another lake."""

    code = "ErrOtherLake"


@dataclass(frozen=True, slots=True)
class Lake:
    """The tables of the demo, in a directory or in a database of the user's."""

    uri: str
    """The sink URI, as `tidemark spark run --target` takes it."""

    @classmethod
    def at(cls, directory: Path, choice: str) -> "Lake":
        """The lake of `--lake`: a format of tables in `directory`, or the URI of a database.

        Raises:
            ConfigError: it is neither.
        """
        if choice in FORMATS:
            return cls(f"{choice}://{directory}")
        try:
            uri = SinkUri.parse(choice)
        except SourceError as err:
            raise ConfigError(f"{_CHOICES}: {err.message}") from None
        if uri.format != "postgresql" or dict(uri.options).get("mode", UPSERT) != UPSERT:
            raise ConfigError(f"{_CHOICES}, in mode {UPSERT}; not {choice!r}")
        return cls(choice)

    def check(self) -> None:
        """See that a database can be connected to, before anything is started.

        Raises:
            LakeUnavailableError: it cannot.
        """
        uri = SinkUri.parse(self.uri)
        if not uri.is_database:
            return
        # Imported here: it brings PySpark.
        from server.verify.lake.database_lake import open_reader

        try:
            open_reader(uri).close()
        except SourceError as err:
            raise LakeUnavailableError(f"the database of --lake cannot be used: {err}") from None


class Applied(ABC):
    """The lake's progress, whoever runs its Spark job."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.applied_ts = 0
        self.rows = 0
        self.cuts = 0
        self._moved = asyncio.Event()

    @abstractmethod
    async def follow(self) -> None:
        """Keep the fields current until cancelled."""

    async def wait_applied(self, ts: int) -> None:
        """Wait until a cut that ends at or after `ts` is visible in the lake."""
        while self.applied_ts < ts:
            # No await lies between the comparison and `clear`, so no move is missed.
            self._moved.clear()
            await self._moved.wait()

    def _move_to(self, ts: int, rows: int) -> None:
        """A cut of `rows` changes that ends at `ts` is visible; a replayed one does not go back."""
        self.applied_ts = max(self.applied_ts, ts)
        self.rows += rows
        self.cuts += 1
        self._moved.set()


class LakeJob(Applied):
    """A running `tidemark spark run`, followed by the lines it prints, one a batch."""

    def __init__(self, lake: Lake, process: Process, log: Path) -> None:
        super().__init__(lake)
        self._process = process
        self._log = log

    @classmethod
    @asynccontextmanager
    async def started(
        cls, flight: str, changefeed: str, lake: Lake, data: Path
    ) -> AsyncIterator["LakeJob"]:
        """The job for the block; it drains on the way out."""
        log = data / "logs" / "spark.log"
        checkpoint = data / "checkpoints"
        arguments = [
            *(
                "spark",
                "run",
                "--follow-parent",
                "--endpoint",
                f"grpc://{flight}",
                "--changefeed",
                changefeed,
            ),
            *(
                "--target",
                lake.uri,
                "--checkpoint-dir",
                str(checkpoint),
                "--http-addr",
                "127.0.0.1:0",
                # A lake that nothing changes moves on, too.
                "--progress-json",
                "-",
            ),
        ]
        async with open_process("server.cli.main", arguments, log) as process:
            yield cls(lake, process, log)

    async def follow(self) -> None:
        """Read the job's lines until cancelled.

        Raises:
            ProcessFailedError: the job ended.
        """
        while True:
            batch = await json_line(self._process, self._log)
            if "end_ts" in batch:
                self._move_to(int(batch["end_ts"]), sum(batch["rows"].values()))


class JoinedLake(Applied):
    """The lake of a changefeed whose Spark job somebody else runs: the captures tell how many of
    its rows the job has acknowledged.
    """

    def __init__(self, lake: Lake, capture: str, changefeed: str) -> None:
        super().__init__(lake)
        self._capture = capture
        self._changefeed = changefeed
        self._acknowledged: int | None = None

    async def follow(self) -> None:
        """Ask for the checkpoint until cancelled."""
        while True:
            # A capture that restarts is asked again.
            with contextlib.suppress(grpc.aio.AioRpcError):
                self.take(await query_changefeed(self._capture, self._changefeed))
            await asyncio.sleep(_POLL_SECONDS)

    def take(self, status: pb.Changefeed) -> None:
        """Count what the job has acknowledged since the last look; the first one counts nothing,
        as an earlier run's rows are not this one's.
        """
        if status.checkpoint_ts <= self.applied_ts:
            return
        now = status.delivery.rows
        before = now if self._acknowledged is None else self._acknowledged
        self._acknowledged = now
        # Another capture that runs the changefeed counts from 0.
        self._move_to(status.checkpoint_ts, now - before if now >= before else now)


async def ensure_changefeed(
    capture: str, changefeed: str, sink_uri: str, tables: list[pb.Table]
) -> None:
    """Create the changefeed unless an earlier run did.

    Raises:
        OtherLakeError: the earlier run's lake is another one, which alone has the changes so far.
    """
    async with connect(capture) as channel:
        stub = ChangefeedServiceStub(channel)
        answer = await stub.ListChangefeeds(pb.ListChangefeedsRequest(), timeout=_RPC_SECONDS)
        existing = next((each for each in answer.changefeeds if each.id == changefeed), None)
        if existing is not None and existing.sink_uri != sink_uri:
            raise OtherLakeError(
                f"changefeed {changefeed} already feeds {existing.sink_uri}, not {sink_uri}; "
                "run with that lake, or start anew elsewhere with --data-dir (make run DATA=…)"
            )
        if existing is not None:
            return
        request = pb.CreateChangefeedRequest(id=changefeed, sink_uri=sink_uri, tables=tables)
        await stub.CreateChangefeed(request, timeout=_RPC_SECONDS)


async def query_changefeed(capture: str, changefeed: str) -> pb.Changefeed:
    """Return the changefeed's status from the capture."""
    async with connect(capture) as channel:
        request = pb.QueryChangefeedRequest(id=changefeed)
        answer = await ChangefeedServiceStub(channel).QueryChangefeed(request, timeout=_RPC_SECONDS)
        return answer.changefeed


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of comparing the lake with the store."""

    cut_ts: int
    cuts: int
    rows: dict[str, int]
    totals: list[int]
    expected_total: int
    differences: list[str]
    p50_seconds: float
    p99_seconds: float

    @property
    def balanced_cuts(self) -> int:
        """The number of cuts in which the bank's total is right."""
        return sum(total == self.expected_total for total in self.totals)

    @property
    def equal(self) -> bool:
        """Whether every row agrees and every cut is balanced."""
        return not self.differences and self.balanced_cuts == len(self.totals) > 0


class LakeReader:
    """A Spark of its own that reads the lake, as any reader would (`server.demo.lake_reader`)."""

    def __init__(self, process: Process, directory: Path, log: Path) -> None:
        self._process = process
        self._directory = directory
        self._log = log

    @classmethod
    @asynccontextmanager
    async def started(cls, lake: Lake, log: Path) -> AsyncIterator["LakeReader"]:
        """The reader for the block; start it before it is needed, as Spark takes a while."""
        with tempfile.TemporaryDirectory(prefix="tidemark-proof-") as directory:
            arguments = [lake.uri, CHANGEFEED, directory]
            async with open_process("server.demo.lake_reader", arguments, log) as process:
                yield cls(process, Path(directory), log)

    async def read(self, since_ts: int) -> tuple[dict[str, Any], dict[str, list[Row]]]:
        """What `server.demo.lake_reader` prints, and the rows of each table at the newest cut.

        Raises:
            ProcessFailedError: Spark could not read the lake; the log says why.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % since_ts)
        answer = await json_line(self._process, self._log)
        files = {name: self._directory / f"{name}.arrow" for name in tables.SPANS}
        return answer, {name: _lake_rows(file) for name, file in files.items()}


async def prove(bank: Bank, client: BankClient, reader: LakeReader, since_ts: int) -> Proof:
    """Compare the lake with the store at the lake's newest cut;
    latencies are of transfers after `since_ts`.

    Raises:
        ProcessFailedError: see `LakeReader.read`.
    """
    answer, lake_rows = await reader.read(since_ts)
    differences: list[str] = []
    for name, span in tables.SPANS.items():
        pairs = await client.scan(span.start_key, span.end_key, answer["cut_ts"])
        differences += _differences(
            name, lake_rows[name], [tables.values(key, row) for key, row in pairs.items()]
        )
    return Proof(
        cut_ts=answer["cut_ts"],
        cuts=answer["cuts"],
        rows={name: len(rows) for name, rows in lake_rows.items()},
        totals=answer["totals"],
        expected_total=bank.total,
        differences=differences,
        p50_seconds=answer["p50_seconds"],
        p99_seconds=answer["p99_seconds"],
    )


def _lake_rows(path: Path) -> list[Row]:
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _differences(name: str, lake: Iterable[Row], store: Iterable[Row]) -> list[str]:
    """Describe the rows that only one side has; duplicate rows differ, too."""
    in_lake, in_store = sorted(lake, key=repr), sorted(store, key=repr)
    if in_lake == in_store:
        return []
    only_lake, only_store = set(in_lake) - set(in_store), set(in_store) - set(in_lake)
    shown = [f"{name}: only in the lake {row}" for row in sorted(only_lake, key=repr)[:_SHOWN]]
    shown += [f"{name}: only in the store {row}" for row in sorted(only_store, key=repr)[:_SHOWN]]
    return shown or [
        (
            f"{name}: {len(in_lake)} rows in the lake, {len(in_store)} in the store: some are there "
            "twice"
        )
    ]
