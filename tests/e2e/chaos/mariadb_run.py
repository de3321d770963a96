"""A run over MariaDB: the history is its binlog."""

import random
import time

import pymysql
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.e2e.chaos import mariadb_workload as workload
from tests.e2e.chaos.checks import Checker
from tests.e2e.chaos.cluster import World
from tests.e2e.chaos.history import Tables, read
from tests.e2e.chaos.run import DATABASE, Run
from tests.mariadb import MariaDb

_WRITERS = 3
_ANSWERS_S = 300.0


class MariaDbRun(Run):
    """See `Run`."""

    columns = workload.COLUMNS
    fills = 2

    def __init__(self, world: World, dice: random.Random) -> None:
        super().__init__(world, dice)
        assert world.server is not None
        self._server: MariaDb = world.server
        self._writers: list[workload.Writer] = []

    def prepare(self) -> None:
        workload.create(self._server)

    def changefeed(self) -> pb.CreateChangefeedRequest:
        uri = f"{self._server.uri}?idle-row-ms=1000&heartbeat-ms=500"
        return pb.CreateChangefeedRequest(source_uri=uri, filter=workload.FILTER)

    def fill(self) -> None:
        workload.fill(self._server)

    def start_writers(self, rate: float) -> None:
        for number in range(1, _WRITERS + 1):
            dice = random.Random(self._dice.getrandbits(64))
            self._writers.append(workload.Writer(self._server, number, dice, _WRITERS / rate))
        for writer in self._writers:
            writer.start()

    def stop_writers(self) -> None:
        deadline = time.monotonic() + _ANSWERS_S
        while not self._answers():
            assert time.monotonic() < deadline, "MariaDB does not answer"
            time.sleep(0.5)
        for writer in self._writers:
            writer.stop()
        self._server.execute("FLUSH BINARY LOGS")

    def checker(self) -> Checker:
        files = sorted((self._world.directory / "mariadb" / "data").glob("binlog.[0-9]*"))
        history = [each for each in read(files, DATABASE) if each.mark is not None]
        committed = [mark for writer in self._writers for mark in writer.committed]
        return Checker(history, committed, dumped=self.dumped)

    def at_source(self) -> Tables:
        return {
            table: {
                row[0]: row
                for row in self._server.execute(
                    f"SELECT {', '.join(columns)} FROM {table}", database=DATABASE
                )
            }
            for table, columns in self.columns.items()
        }

    def _answers(self) -> bool:
        try:
            return bool(self._server.execute("SELECT 1"))
        except pymysql.Error:
            return False
