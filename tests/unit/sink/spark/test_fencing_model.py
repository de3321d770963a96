"""Drivers that die, sleep and wake between any two requests: one chain of cuts,
and tables that equal it at each.

Each driver is a thread that makes one request when it is told to, so Hypothesis orders the requests
of all. The tables are an oracle with the fence of the formats: whoever writes up to a ts that a
table has reached writes nothing.
"""

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import manifest as manifests
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut
from pyspark_tidemark.lake.manifest import FileManifest, cuts_in

from tests.unit.sink.spark.memory_files import MemoryFiles

TABLES = ("b.a", "b.b")
AGES_AGO = manifests.datetime.fromisoformat("2020-01-01T00:00:00+00:00")


class KilledError(BaseException):
    """The driver is dead."""


class Table:
    """Ranges in the order in which they were applied; a version is how many there are."""

    def __init__(self):
        self.ranges = []

    @property
    def position(self):
        return self.ranges[-1][1] if self.ranges else 0

    def write(self, start_ts, end_ts):
        if end_ts > self.position:
            self.ranges.append((start_ts, end_ts))
        return len(self.ranges)


class Lake:
    """What outlives drivers."""

    def __init__(self):
        self.cuts, self.claims = MemoryFiles(), MemoryFiles()
        self.tables = {name: Table() for name in TABLES}
        self.newest = 0
        """The claim of the last driver that has taken it over, all of it."""


class Driver:
    """One life, a request a `step`; cuts are of `width`."""

    def __init__(self, lake, width):
        self.width = width
        self.taken = 0
        self.error = None
        self.committed = 0
        self._lake = lake
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._dead = self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._paused.acquire()

    @property
    def alive(self):
        return self._thread.is_alive()

    def step(self):
        self._go.release()
        self._paused.acquire()
        if self._ended:
            self._thread.join()

    def kill(self):
        self._dead = True
        if self.alive:
            self.step()

    def request(self, made):
        """Wait for the turn, then do it."""
        self._paused.release()
        self._go.acquire()
        if self._dead:
            raise KilledError
        return made()

    def _run(self):
        try:
            self._live()
        except (SourceError, AssertionError) as err:
            self.error = err
        except KilledError:
            pass
        finally:
            self._ended = True
            self._paused.release()

    def _live(self):
        files = (
            Requests(self, self._lake.cuts, self._lake),
            Requests(self, self._lake.claims, self._lake),
        )
        manifest = FileManifest.taken(*files, "bank", "hdfs://n/lake")
        self._lake.newest = max(self._lake.newest, self.taken)
        known = {}
        while True:
            start_ts = manifest.last.end_ts if manifest.last else 0
            end_ts = manifest.announce(start_ts, start_ts + self.width)
            parts = [
                TableCut(name, 1, self._write(known, name, start_ts, end_ts)) for name in TABLES
            ]
            manifest.commit(
                CutRecord("bank", start_ts, end_ts, 0, "2026-01-01T00:00:00+00:00", tuple(parts))
            )
            self.committed += 1
            manifest.tidy(AGES_AGO)

    def _write(self, known, name, start_ts, end_ts):
        """As `CutApplier`: where a table stands is asked once, then remembered."""
        table = self._lake.tables[name]
        if name not in known:
            known[name] = self.request(lambda: table.position)
        if known[name] < end_ts:
            self.request(lambda: table.write(max(start_ts, known[name]), end_ts))
            known[name] = end_ts
        return self.request(lambda: len(table.ranges))


class Requests:
    """A directory, by the requests of one driver."""

    def __init__(self, driver, files, lake):
        self._driver, self._files, self._lake = driver, files, lake

    def names(self):
        return self._driver.request(self._files.names)

    def read(self, name):
        return self._driver.request(lambda: self._files.read(name))

    def create(self, name, text):
        return self._driver.request(lambda: self._created(name, text))

    def remove(self, names):
        for name in names:
            self._driver.request(lambda name=name: self._files.remove([name]))

    def _created(self, name, text):
        made = self._files.create(name, text)
        if made and self._files is self._lake.claims:
            assert self._driver.taken >= self._lake.newest or not self._driver.taken, (
                "one that was taken over announces"
            )
            self._driver.taken = self._driver.taken or int(name)
        elif made and text and "-" not in name:
            assert self._driver.taken >= self._lake.newest, "one that was taken over publishes"
        return made


class Drivers(RuleBasedStateMachine):
    """Any number of them on one lake."""

    def __init__(self):
        super().__init__()
        self.lake = Lake()
        self.drivers = []
        self._rolled_up, manifests.ROLL_UP_FILES = manifests.ROLL_UP_FILES, 3

    @rule(width=st.integers(1, 9))
    @precondition(lambda self: len(self.drivers) < 4)
    def start(self, width):
        self.drivers.append(Driver(self.lake, width))

    @rule(data=st.data(), steps=st.integers(1, 30))
    @precondition(lambda self: self.drivers)
    def go_on(self, data, steps):
        driver = data.draw(st.sampled_from(self.drivers))
        for _ in range(steps):
            if driver.alive:
                driver.step()
        self._bury()

    @rule(data=st.data())
    @precondition(lambda self: self.drivers)
    def die(self, data):
        data.draw(st.sampled_from(self.drivers)).kill()
        self._bury()

    @rule(width=st.integers(1, 9))
    def a_new_driver_needs_nobody(self, width):
        driver = Driver(self.lake, width)
        for _ in range(400):
            if driver.committed < 2:
                driver.step()
        assert driver.committed >= 2, driver.error
        driver.kill()

    @invariant()
    def cuts_follow_each_other_and_tables_equal_them(self):
        cuts = cuts_in(self.lake.cuts)
        assert [cut.start_ts for cut in cuts] == [0] * bool(cuts) + [
            cut.end_ts for cut in cuts[:-1]
        ]
        for name, table in self.lake.tables.items():
            assert [start for start, _ in table.ranges] == [0] * bool(table.ranges) + [
                e for _, e in table.ranges[:-1]
            ]
            shown = [
                (cut.end_ts, item.version)
                for cut in cuts
                for item in cut.tables
                if item.table == name
            ]
            assert all(table.ranges[version - 1][1] == end_ts for end_ts, version in shown)

    def teardown(self):
        for driver in self.drivers:
            driver.kill()
        manifests.ROLL_UP_FILES = self._rolled_up

    def _bury(self):
        for driver in self.drivers:
            if not driver.alive:
                assert (
                    driver.error is None or getattr(driver.error, "code", "") == "ErrTargetBusy"
                ), driver.error
        self.drivers = [driver for driver in self.drivers if driver.alive]


TestDrivers = Drivers.TestCase
TestDrivers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
