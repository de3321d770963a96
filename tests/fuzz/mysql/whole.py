"""Random lives of tables on a real server, through a real capture: each ends equal to SELECT,
or stopped by its name.

    python -m tests.fuzz.mysql.whole --lives 12 [--seed N] [--seconds S] [--plant
    harmless|rename|savepoint]

A life is a schema, a changefeed and some hundred steps of `statements`: sessions write, alter and
undo, while daemons are paused and killed. The lake is one in memory behind the lake job's own code.
A life that ends wrong is shrunk to the steps that make it so, and printed with its seed.
"""

import argparse
import contextlib
import itertools
import json
import random
import re
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import pymysql
from pymysql.connections import Connection
from pymysql.cursors import Cursor
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as feedpb
from tidemarkpb.v1 import dump_pb2 as dumppb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from server.changefeed.filter import exact_rule
from tests.fuzz.mysql import plants
from tests.fuzz.mysql.oracle import OracleWriter
from tests.fuzz.mysql.statements import HAZARDS, SESSIONS, Writer, family_of
from tests.integration.capture.processes import Cluster, Daemon
from tests.integration.lake.memory import MemoryLake
from tests.integration.mysql.selected import columns_of, difference, rows_now, tables_now
from tests.mariadb import MYSQLD, MariaDb, running_mariadb

STEPS: Final = 300
FILTERS: Final = 0.02
"""How often a step is followed by another filter."""
PATIENCE_S: Final = 240.0
OTHER_COLUMN: Final = "is another one on the server"
"""What a dump says of a table that was altered, while the log has yet to tell."""
UNTRUE_LOG: Final = "not what its log made of them"
GONE_UNTOLD: Final = "TM:ErrDumpRereadFailed"
"""A table that is to be read again is gone, and the log does not tell."""
_REPLACES: Final = re.compile(r"CREATE OR REPLACE TABLE\b.*\bSELECT\b", re.I | re.S)
SHRINK_RUNS: Final = 60
LOCKED: Final = (1205, 1213)
"""Codes of a server that did not wait for a lock."""
INSIDE, OUTSIDE, END = "@inside@", "@outside@", "the_end"
WRITER: Final = OracleWriter if MYSQLD else Writer
PATIENT: Final = 2 if MYSQLD else 4
"""Statements that meet a lock before all sessions commit; MySQL waits a second for each."""
RIGHT_STOPS: Final = {
    "statement": ("ErrMySQLStatementLogged", "ErrMySQLRowsMoved"),
    "savepoint": ("ErrMySQLSavepointUnclear", "ErrMySQLStatementLogged"),
    "temporary": ("ErrMySQLStatementLogged", "ErrMySQLSavepointUnclear"),
    "type": (),
    "key": ("ErrTableIneligible", "ErrKeyUnknown", "ErrKeyValueUnsupported"),
    "engine": ("ErrTableIneligible",),
    "cascade": ("ErrTableIneligible",),
    "image": ("ErrRowImageNotFull", "ErrBinlogEventUnsupported"),
}
"""What each hazard may be answered with. A column's other type is no reason to stop: its table is
read again.
"""


class WrongError(AssertionError):
    """Rows are not those of the server, or a changefeed stopped by another name than it should
    have.
    """


@dataclass
class World:
    """A server and a cluster, which lives use one after the other."""

    server: MariaDb
    cluster: Cluster
    plant: str = ""
    other: Daemon | None = None
    """A second capture: changefeeds are moved from one to the other, too."""

    @property
    def endpoint(self) -> str:
        """Of the capture's Flight."""
        return f"grpc://{self.cluster.capture.endpoints['flight']}"

    def traces(self) -> str:
        """What the capture's log has of errors that nobody expected; its directory goes at the
        end.
        """
        lines = self.cluster.capture.log.read_text(errors="replace").splitlines()
        return "\n".join(map(_trace, lines[-400:])).strip()

    def move(self, place: int) -> None:
        """Let changefeeds go to the other capture, one of two, which may have to take them from a
        dead one.
        """
        with (
            grpc.insecure_channel(self.cluster.capture.endpoints["capture"]) as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            captures = CaptureServiceStub(channel)
            listed = captures.ListCaptures(
                capturepb.ListCapturesRequest(), timeout=60, wait_for_ready=True
            )
            names = sorted(each.id for each in listed.captures)
            for name in names:
                captures.DrainCapture(
                    capturepb.DrainCaptureRequest(id=name, cancel=True), timeout=60
                )
            captures.DrainCapture(capturepb.DrainCaptureRequest(id=names[place]), timeout=60)

    def dumps(self, method: str, request: Any) -> Any:
        """A call of the dump API; None: it was refused."""
        with (
            grpc.insecure_channel(self.cluster.capture.endpoints["capture"]) as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            return getattr(DumpServiceStub(channel), method)(
                request, timeout=60, wait_for_ready=True
            )


def _trace(line: str) -> str:
    """What a line of a log has of a trace, with its line ends."""
    if not line.startswith("{"):
        return line
    with contextlib.suppress(ValueError):
        return str(json.loads(line).get("exception", ""))
    return ""


@contextlib.contextmanager
def world(plant: str = "", captures: int = 1) -> Iterator[World]:
    """A fresh one, with one or two captures; with a plant they have a bug."""
    with (
        tempfile.TemporaryDirectory(prefix="tm-fuzz-") as directory,
        # Without it no function may change rows.
        running_mariadb("--log-bin-trust-function-creators=ON") as server,
    ):
        with plants.planted(plant):
            cluster = Cluster(Path(directory))
            other = cluster.another_capture() if captures > 1 else None
        try:
            yield World(server, cluster, plant, other)
        finally:
            cluster.stop()


class Follower(threading.Thread):
    """Reads a changefeed as a lake job does, until it is told to end, or cannot go on."""

    def __init__(self, changefeed: Changefeed, start_ts: int, rests_s: float = 0.0) -> None:
        """It rests so long at most after each cut."""
        super().__init__(daemon=True)
        self.lake = MemoryLake(changefeed, start_ts)
        self._rests_s = rests_s
        self.failure: BaseException | None = None
        self.ending = False

    def run(self) -> None:
        while not self.ending:
            try:
                self.lake.follow(wait_ms=100)
                time.sleep(random.uniform(0, self._rests_s))
            except SourceError as err:
                if not err.retryable:
                    self.failure = err
                    return
            except BaseException as err:  # noqa: BLE001 - whatever it is, the life shows it
                self.failure = err
                return


@dataclass
class Life:
    """One of them; `steps` are given, or made from the seed."""

    world: World
    seed: int
    steps: list[str] | None = None
    told: Counter[str] = field(default_factory=Counter)
    number: int = 0
    length: int = STEPS
    hazards: frozenset[str] | None = None
    explains: bool = False
    filters: bool = False
    """Whether the changefeed gets other filters meanwhile; such a life has no hazards."""
    readers: bool = False
    """Whether the changefeed has two readers, each with a name, of which one is slow."""
    left_out: set[str] = field(default_factory=set)
    """Tables that one of them left out: one that was dropped then stays in the lake."""

    def run(self) -> str:
        """The code of the stop; nothing if all is equal.

        Raises:
            WrongError: it ended wrong; `steps` are what was done.
        """
        self.inside, self.outside = f"w{self.seed}x{self.number}", f"o{self.seed}x{self.number}"
        self.random = random.Random(self.seed)
        self.chances = random.Random(
            self.seed
        )  # others' steps are the same with and without filters
        if self.hazards is None:
            self.hazards = frozenset() if self.filters else self._hazards()
        self.sessions: list[Connection[Cursor] | None] = [None] * SESSIONS
        self.paused, self.blocked = False, 0
        # MariaDB logs RENAME of a temporary table as the real one's: no reader of the log can know.
        self.log_may_lie = "temporary" in self.hazards
        server = self.world.server
        server.execute(f"CREATE DATABASE {self.inside}", f"CREATE DATABASE {self.outside}")
        try:
            return self._live()
        finally:
            self.told["lives"] += 1
            self._forget()

    def _hazards(self) -> frozenset[str]:
        """Every other life has none, so that it lasts; the others have each hazard in turn,
        and some a second one.
        """
        if self.seed % 2:
            return frozenset()
        return frozenset(
            {
                HAZARDS[self.seed // 2 % len(HAZARDS)],
                *self.random.sample(HAZARDS, self.random.choice((0, 1))),
            }
        )

    def _live(self) -> str:
        assert self.hazards is not None
        writer = WRITER(self.random, INSIDE, OUTSIDE, self.hazards)
        given, begin = self.steps, writer.begin()
        is_dumped = self.random.random() < 0.4
        first = (
            begin
            if is_dumped
            else [step for step in begin if "INSERT INTO" not in step.partition(" FOR EACH ROW")[0]]
        )
        for step in first:
            self._do(step)
        self._create_feed()
        if is_dumped:
            self._dump()
        else:
            for step in begin[len(first) :]:
                self._do(step)
        self.steps = []
        for place in range(self.length if given is None else len(given)):
            if given is None and (place == 0 or "TABLE" in self.steps[-1].upper()):
                writer.columns, writer.types = self._columns()
            step = given[place] if given is not None else writer.step()
            self.steps.append(step)
            self._do(step)
            if self.filters and given is None and self.chances.random() < FILTERS:
                self.steps.append("!filter")
                self._do("!filter")
            if self._failure is not None:
                break
        return self._end()

    def _columns(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """The columns of the tables that there are now, and the families of their types."""
        rows = self.world.server.execute(
            "SELECT table_name, column_name, column_type FROM information_schema.columns WHERE "
            "table_schema ="
            f" '{self.inside}' ORDER BY table_name, ordinal_position"
        )
        columns, families = defaultdict(list), {}
        for table, column, declared in rows:
            columns[table].append(column)
            family = family_of(declared)
            if family is not None:
                families[f"{table}.{column.lower()}"] = family
        return columns, families

    def _create_feed(self) -> None:
        uri = f"{self.world.server.uri}?idle-row-ms=300&heartbeat-ms=100&catalogue-check-s=1"
        request = feedpb.CreateChangefeedRequest(
            id=self.inside, sink_uri="flight://", source_uri=uri, filter=[f"{self.inside}.*"]
        )
        start_ts = self.world.cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts
        self.follower = self._followed("fast" if self.readers else "", start_ts)
        self.followers = [self.follower]
        if self.readers:
            self.followers.append(self._followed("slow", start_ts, 3.0))

    def _followed(self, reader: str, start_ts: int, rests_s: float = 0.0) -> Follower:
        if reader:
            adding = feedpb.AddReaderRequest(id=self.inside, name=reader)
            self.world.cluster.api("AddReader", adding)
        options = {
            "endpoint": self.world.endpoint,
            "changefeed": self.inside,
            "cuts": "true",
            "ack": "false",
            "reader": reader,
        }
        follower = Follower(Changefeed(parse(options)), start_ts, rests_s)
        follower.start()
        return follower

    @property
    def _failure(self) -> BaseException | None:
        """Why one that follows the changefeed cannot go on."""
        return next((each.failure for each in self.followers if each.failure is not None), None)

    # Steps

    def _do(self, step: str) -> None:
        if step.startswith("!"):
            self.told[step] += 1
            getattr(self, f"_{step[1:].replace(' ', '_')}")()
            return
        session, _, sql = step.partition(": ")
        text = sql.replace(INSIDE, self.inside).replace(OUTSIDE, self.outside)
        try:
            connection = self._session(int(session))
            with connection.cursor() as cursor:
                cursor.execute(text)
            self.told["statements"] += 1
        except (pymysql.Error, UnicodeError) as err:
            self.told["refused"] += 1
            # With autocommit=0 MariaDB drops the table then, and logs nothing of it.
            self.log_may_lie |= bool(_REPLACES.search(text))
            if self.explains:
                print(f"  {err} | {text}", flush=True)
            if not isinstance(err, pymysql.ProgrammingError) and err.args[0] in (2006, 2013, 0):
                self.sessions[int(session)] = None
            elif err.args[0] in LOCKED:
                self._unblock()

    def _unblock(self) -> None:
        """Now and then whoever holds locks commits: else most of a life is refused."""
        self.blocked += 1
        if self.blocked % PATIENT == 0:
            for session in filter(None, self.sessions):
                with contextlib.suppress(pymysql.Error), session.cursor() as cursor:
                    cursor.execute("COMMIT")

    def _session(self, number: int) -> "Connection[Cursor]":
        connection = self.sessions[number]
        if connection is None:
            connection = self.sessions[number] = self.world.server.connect(self.inside)
            with connection.cursor() as cursor:
                cursor.execute("SET lock_wait_timeout=0, innodb_lock_wait_timeout=0, sql_mode=''")
        return connection

    def _pause(self) -> None:
        if self.world.other is not None and self.random.random() < 0.7:
            self.told["moves"] += 1
            self.world.move(self.random.randrange(2))
        else:
            self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        method = "ResumeChangefeed" if self.paused else "PauseChangefeed"
        request = getattr(feedpb, f"{method}Request")(id=self.inside)
        try:
            self.world.cluster.api(method, request)
        except grpc.RpcError:  # it has stopped
            return
        self.paused = not self.paused

    def _kill_capture(self) -> None:
        capture = self.world.cluster.capture
        if self.world.other is not None and self.random.random() < 0.5:
            capture = self.world.other
        capture.kill()
        with plants.planted(self.world.plant):
            capture.start()

    def _kill_server(self) -> None:
        self.world.server.kill()
        self.sessions = [None] * SESSIONS
        self.world.server.start()

    def _dump(self) -> None:
        if (
            self.world.dumps("StartDump", dumppb.StartDumpRequest(changefeed_id=self.inside))
            is None
        ):
            self.world.dumps("RestartDump", dumppb.RestartDumpRequest(changefeed_id=self.inside))

    def _filter(self) -> None:
        """Leave a table out, or take all."""
        rules = [f"{self.inside}.*"]
        tables = sorted({name for name, *_ in self._tables()} - {END})
        if tables and self.chances.random() < 0.6:
            name = self.chances.choice(tables)
            self.left_out.add(f"{self.inside}.{name}")
            rules.append(f"!{exact_rule(self.inside, name)}")
        self._update(rules)

    def _tables(self) -> Sequence[tuple[Any, ...]]:
        return self.world.server.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE' AND "
            f"table_schema = '{self.inside}'"
        )

    def _update(self, rules: Sequence[str]) -> bool:
        request = feedpb.UpdateChangefeedRequest(id=self.inside, filter=rules)
        try:
            self.world.cluster.api("UpdateChangefeed", request)
        except grpc.RpcError as err:
            self.told[f"filter refused: {str(err.details())[:40]}"] += 1
            return False
        return True

    def _rotate(self) -> None:
        self.world.server.execute("FLUSH BINARY LOGS")

    def _settle(self) -> None:
        """Let the lake come near: what follows is read while the catalogue has it."""
        until = time.monotonic() + 1.0
        at_ts = self.follower.lake.at_ts
        while not self.paused and self.follower.lake.at_ts == at_ts and time.monotonic() < until:
            time.sleep(0.02)

    # The end

    def _end(self) -> str:
        for session in filter(None, self.sessions):
            with contextlib.suppress(pymysql.Error):
                session.close()
        self.sessions = [None] * SESSIONS
        server = self.world.server
        deadline = time.monotonic() + PATIENCE_S
        self._roll_back_prepared()
        if self.paused:
            self._pause_or_resume()
        while self.filters and not self._update([f"{self.inside}.*"]):
            if self._failure is not None:
                return self._stopped(self._failure)
            if time.monotonic() > deadline:
                raise WrongError("the last filter is refused")
            time.sleep(0.5)
        server.execute(
            f"CREATE TABLE {self.inside}.{END} (id INT PRIMARY KEY)",
            f"INSERT INTO {self.inside}.{END} VALUES (1)",
        )
        wrong = "the end does not come"
        while time.monotonic() < deadline:
            if self._failure is not None:
                return self._stopped(self._failure)
            self._roll_back_prepared()
            if self._has_ended():
                wrong = self._wrong()
                if not wrong:
                    self.told["equal"] += 1
                    return ""
                deadline = min(deadline, time.monotonic() + 60)
            time.sleep(0.1)
        assert self.hazards is not None
        state = self.world.cluster.api(
            "QueryChangefeed", feedpb.QueryChangefeedRequest(id=self.inside)
        ).changefeed
        untrue = any(UNTRUE_LOG in text for text in state.warnings)
        if self.log_may_lie and (untrue or state.error.code == GONE_UNTOLD):
            self.told["warned"] += 1
            return "a warning"
        raise WrongError(
            f"{wrong} (state {state.state}, {state.error.code} {state.error.message}; "
            f"dump: {self._dump_status()})"
        )

    def _roll_back_prepared(self) -> None:
        """Of sessions that are gone; one that is not gone yet is for the next time."""
        for *_, data in self.world.server.execute("XA RECOVER"):
            with contextlib.suppress(pymysql.Error):
                self.world.server.execute(f"XA ROLLBACK '{data}'")

    def _has_ended(self) -> bool:
        for follower in self.followers:
            table = follower.lake.target.tables.get(f"{self.inside}.{END}")
            if table is None or not table.rows:
                return False
        if self.filters:
            request = feedpb.QueryChangefeedRequest(id=self.inside)
            if self.world.cluster.api("QueryChangefeed", request).changefeed.HasField(
                "filter_update"
            ):
                return False
        status = self._dump_status()
        return status is None or status.dump.state in ("", "finished", "failed")

    def _dump_status(self) -> Any:
        return self.world.dumps(
            "GetDumpStatus", dumppb.GetDumpStatusRequest(changefeed_id=self.inside)
        )

    def _wrong(self) -> str:
        """What is not as the server has it; nothing if all lakes are."""
        found = (self._wrong_in(follower.lake.target) for follower in self.followers)
        return next(filter(None, found), "")

    def _wrong_in(self, target: Any) -> str:
        if target.doubled:
            raise WrongError(f"inserts of keys that were there: {target.doubled[:3]}")
        assert self.hazards is not None
        status = self._dump_status()
        if status is not None and "temporary" not in self.hazards:
            refused = [
                each
                for each in status.status
                if each.state == "failed" and OTHER_COLUMN in each.error
            ]
            if refused:
                raise WrongError(f"a dump gave up at what the log told later: {refused[0]}")
        server = self.world.server
        with contextlib.closing(server.connect()) as connection:
            now = tables_now(connection, server.port, self.inside)
            names = {f"{self.inside}.{name}" for name in now}
            gone = self.left_out - names
            if target.tables.keys() - gone != names:
                return f"tables {sorted(target.tables)}, not {sorted(names)}"
            for name, table in now.items():
                mine = target.tables[f"{self.inside}.{name}"]
                types = columns_of(table.mounter.schema)
                if columns_of(mine.schema) != types and sorted(
                    columns_of(mine.schema).items()
                ) != sorted(types.items()):
                    return f"{name}: columns {columns_of(mine.schema)}, not {types}"
                key = tuple(table.mounter.key_columns)
                if why := difference(list(mine.rows.values()), rows_now(connection, table), key):
                    return f"{name}: {why}"
        return ""

    def _stopped(self, failure: BaseException) -> str:
        if not isinstance(failure, SourceError):
            raise WrongError(f"the lake job: {type(failure).__name__}: {failure}") from failure
        code, message = failure.code, failure.message
        if code == "ErrChangefeedFailed":
            request = feedpb.QueryChangefeedRequest(id=self.inside)
            error = self.world.cluster.api("QueryChangefeed", request).changefeed.error
            code, message = error.code.removeprefix("TM:"), error.message
            # A step that resumed it since has taken its error away.
            if not code and (told := re.search(r" after (?:TM:)?(Err\w+): ", failure.message)):
                code, message = told.group(1), failure.message
        assert self.hazards is not None
        right = {each for hazard in self.hazards for each in RIGHT_STOPS[hazard]}
        if code not in right:
            raise WrongError(
                f"stopped by {code}, with hazards {sorted(self.hazards)}: "
                f"{message or failure.message}"
            )
        self.told[f"stopped by {code}"] += 1
        return code

    def _forget(self) -> None:
        followers = getattr(self, "followers", [])
        for follower in followers:
            follower.ending = True
        if followers:
            with contextlib.suppress(grpc.RpcError):
                self.world.cluster.api(
                    "RemoveChangefeed", feedpb.RemoveChangefeedRequest(id=self.inside)
                )
        for follower in followers:
            follower.join()
        for session in filter(None, self.sessions):
            with contextlib.suppress(pymysql.Error):
                session.close()
        with contextlib.suppress(pymysql.Error):
            self.world.server.execute(
                f"DROP DATABASE {self.inside}", f"DROP DATABASE {self.outside}"
            )


def _kind(error: WrongError) -> str:
    """What is the same of two errors, if they are of one cause."""
    return " ".join(str(error).split()[:3])


def shrunk(
    world_: World, life: Life, error: WrongError, *, runs: int = SHRINK_RUNS
) -> tuple[list[str], str]:
    """Fewer steps that end wrong, too, and how: pieces are left out as long as that is so."""
    assert life.steps is not None
    steps, why, size, number = list(life.steps), str(error), max(1, len(life.steps) // 2), 0
    wanted = _kind(error)
    while size and number < runs:
        place = 0
        while place < len(steps) and number < runs:
            number += 1
            fewer = steps[:place] + steps[place + size :]
            try:
                Life(
                    world_,
                    life.seed,
                    fewer,
                    number=number,
                    hazards=life.hazards,
                    filters=life.filters,
                    readers=life.readers,
                ).run()
            except WrongError as err:
                if _kind(err) == wanted:
                    steps, why = fewer, str(err)
                    continue
            place += size
        size //= 2
    return steps, why


def lives(
    world_: World,
    seeds: Sequence[int] | Iterator[int],
    *,
    seconds: float = 1e9,
    length: int = STEPS,
) -> Counter[str]:
    """Run them one after the other; what happened, counted.

    Raises:
        WrongError: with the seed, and the steps.
    """
    told: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for seed in seeds:
        life = Life(world_, seed, told=told, length=length)
        try:
            life.run()
        except WrongError as err:
            print(f"seed {seed}: {err}; looking for fewer steps", flush=True)
            steps, why = shrunk(world_, life, err, runs=10)
            listed = "\n".join(steps)
            raise WrongError(
                f"seed {seed}: {err}\nshrunk to {len(steps)} steps ({why}):\n{listed}\n{dict(told)}"
            ) from err
        if time.monotonic() > deadline:
            break
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lives", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--goes-on", action="store_true", help="print what is wrong, and go on with the next life"
    )
    parser.add_argument(
        "--shrink", type=int, default=SHRINK_RUNS, help="runs that look for fewer steps"
    )
    parser.add_argument("--explain", action="store_true", help="print what the server refuses")
    parser.add_argument(
        "--filters",
        action="store_true",
        help="give changefeeds other filters; lives have no hazards",
    )
    parser.add_argument(
        "--readers", action="store_true", help="two readers with names, one of them slow"
    )
    parser.add_argument("--captures", type=int, default=1, choices=(1, 2))
    parser.add_argument("--plant", default="", choices=("", *plants.PLANTS))
    arguments = parser.parse_args()
    first = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    begun, told = time.monotonic(), Counter[str]()
    seeds = itertools.islice(itertools.count(first), arguments.lives)
    print(f"first seed {first}", flush=True)
    while time.monotonic() - begun < arguments.seconds:
        with world(arguments.plant, arguments.captures) as world_:
            for seed in seeds:
                life = Life(
                    world_,
                    seed,
                    told=told,
                    explains=arguments.explain,
                    filters=arguments.filters,
                    readers=arguments.readers,
                )
                try:
                    code = life.run()
                except WrongError as err:
                    told["wrong"] += 1
                    print(
                        f"WRONG after {time.monotonic() - begun:.0f} s, seed {seed}, hazards "
                        f"{life.hazards}: {err}\n{world_.traces()}",
                        flush=True,
                    )
                    steps, why = shrunk(world_, life, err, runs=arguments.shrink)
                    print(
                        f"shrunk to {len(steps)} steps ({why}):\n  " + "\n  ".join(steps),
                        flush=True,
                    )
                    if not arguments.goes_on:
                        raise SystemExit(1) from err
                else:
                    print(
                        f"{time.monotonic() - begun:.0f} s, seed {seed}: {code or 'equal'}; "
                        f"{dict(told)}",
                        flush=True,
                    )
                if time.monotonic() - begun > arguments.seconds:
                    break
            else:
                break
    print(f"{time.monotonic() - begun:.0f} s: {dict(told)}")


if __name__ == "__main__":
    main()
