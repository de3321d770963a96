"""Full and broken disks, damaged files, killed processes: nothing is lost in silence,
and things go on alone.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from sorter import Sorter, SorterSettings
from sorter.errors import BlockCorruptError, RowsLostError, SorterClosedError
from storage.kv import WriteBatch
from storage.leveldb import DirectoryLockedError, DirectoryUnusableError, LevelDB
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span
from tests.small_disk import small_disk

SPAN = Span(7, b"a", b"b")


def rows(first_ts: int, count: int, size: int = 100) -> pa.RecordBatch:
    ts = list(range(first_ts, first_ts + count))
    return raw_batch(
        ts,
        [it - 1 for it in ts],
        [INSERT] * count,
        [b"k"] * count,
        [bytes(size)] * count,
        [None] * count,
    )


def fetched(sorter: Sorter, lower_ts: int, upper_ts: int) -> list[int]:
    batches = sorter.fetch(SPAN, Position(lower_ts, 0), Position.fence(upper_ts))
    return [ts for batch in batches for ts in batch.column(0).to_pylist()]


def opened(directory: Path, **sizes: int) -> Sorter:
    sizes = {"memory_bytes": 1 << 20, "block_bytes": 1024, "segment_bytes": 4096, **sizes}
    sorter = Sorter(
        directory, SorterSettings(**sizes, shards=1, clean_interval_s=0, disk_retry_s=0.01)
    )
    sorter.add_table(SPAN, 0)
    return sorter


@pytest.fixture
def sorter(tmp_path: Path) -> Iterator[Sorter]:
    engine = opened(tmp_path)
    yield engine
    engine.close()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """`work` goes on beside the block, and must be able to end when the block has."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as err:
            errors.append(err)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
    assert not thread.is_alive()
    assert not errors, errors


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("did not come to pass")


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_blocks_that_a_full_disk_refuses_stay_in_memory(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorter.add(SPAN, rows(1, 100))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", no_room)
        sorter.resolve(SPAN, 100)
        assert "No space left" in sorter.stats().disk_error
        assert fetched(sorter, 1, 100) == list(range(1, 101))
    wait_until(sorter._disk.may_write)
    sorter.resolve(SPAN, 101)
    assert sorter.stats().disk_error == ""
    assert sorter.stats().live_blocks
    assert fetched(sorter, 1, 101) == list(range(1, 101))


def test_the_feed_pauses_while_the_disk_is_full_and_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorter = opened(tmp_path, memory_bytes=50_000)

    def feed() -> None:
        for first in range(1, 2001, 10):
            sorter.add(SPAN, rows(first, 10))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", no_room)
        with in_thread(feed):
            wait_until(lambda: sorter.stats().waiting == 1)
            assert sorter.stats().rows_in < 2000
            assert sorter.stats().memory_bytes < 60_000
            patch.undo()
    assert sorter.stats().disk_error == ""
    sorter.resolve(SPAN, 2000)
    assert fetched(sorter, 1, 2000) == list(range(1, 2001))
    sorter.close()


@pytest.mark.parametrize("end", ["end_waits", "close", "remove"])
def test_who_waits_for_a_full_disk_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    sorter = opened(tmp_path, memory_bytes=1)
    monkeypatch.setattr(os, "pwritev", no_room)

    def feed() -> None:
        if end == "remove":
            sorter.add(SPAN, rows(1, 10))
        else:
            with pytest.raises(SorterClosedError):
                sorter.add(SPAN, rows(1, 10))

    with in_thread(feed):
        wait_until(lambda: sorter.stats().waiting == 1)
        if end == "remove":
            sorter.remove_table(SPAN)
        else:
            getattr(sorter, end)()
    sorter.close()


def test_a_really_full_disk_is_lived_through(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "6m") as disk:
        sorter = opened(disk, memory_bytes=1 << 20, block_bytes=64 << 10, segment_bytes=512 << 10)

        def feed() -> None:
            for first in range(1, 20_001, 100):
                sorter.add(SPAN, rows(first, 100, size=1000))
                sorter.resolve(SPAN, first + 99)

        done, pauses = 0, 0
        with in_thread(feed):
            while done < 20_000:
                wait_until(
                    lambda: sorter.stats().waiting == 1 or sorter.resolved_ts(SPAN) == 20_000
                )
                pauses += sorter.stats().waiting
                upper = sorter.resolved_ts(SPAN)
                assert fetched(sorter, done + 1, upper) == list(range(done + 1, upper + 1))
                sorter.clean(SPAN, Position.fence(upper))
                done = upper
        assert pauses
        sorter.close()


def test_an_index_whose_disk_was_full_is_made_anew(
    sorter: Sorter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DirectoryUnusableError("no space")

    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    blocks, segments = sorter.stats().live_blocks, sorter.stats().segments
    assert blocks
    with monkeypatch.context() as patch:
        patch.setattr(LevelDB, "write", refuse)
        sorter.add(SPAN, rows(101, 100))
        sorter.resolve(SPAN, 200)
        assert "no space" in sorter.stats().disk_error
        assert (sorter.stats().live_blocks, sorter.stats().segments) == (blocks, segments)
        sorter.clean(SPAN, Position.fence(100))  # most of all now
        assert sorter.stats().live_blocks == sorter.stats().segments == 0
    wait_until(sorter._disk.may_write)
    sorter.resolve(SPAN, 201)
    assert sorter.stats().disk_error == ""
    assert sorter.stats().live_blocks
    assert fetched(sorter, 101, 201) == list(range(101, 201))
    sorter.clean(SPAN, Position.fence(201))
    assert sorter.stats().live_blocks == 0
    assert list(sorter._stores[0]._database.scan(b"", b"")) == []


def test_the_disk_space_of_cleaned_rows_comes_back(tmp_path: Path) -> None:
    sorter = opened(tmp_path, block_bytes=16 << 10, segment_bytes=256 << 10)
    before = used_bytes(tmp_path)
    for first in range(1, 10_001, 500):
        sorter.add(SPAN, rows(first, 500, size=500))
        sorter.resolve(SPAN, first + 499)
    assert used_bytes(tmp_path) > before + 5_000_000
    sorter.clean(SPAN, Position.fence(5000))
    assert used_bytes(tmp_path) < before + 3_500_000
    sorter.clean(SPAN, Position.fence(10_000))
    assert used_bytes(tmp_path) < before + 100_000
    sorter.close()


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))


def damaged_in(
    sorter: Sorter, tmp_path: Path, damage: Callable[[Path], object]
) -> BlockCorruptError:
    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    damage(min(tmp_path.glob("*/segments/*")))
    with pytest.raises(BlockCorruptError, match="table 7, commit_ts 1 to") as caught:
        fetched(sorter, 1, 100)
    return caught.value


def flip(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda it: os.truncate(it, 70), lambda it: os.truncate(it, 0), Path.unlink],
    ids=range(4),
)
def test_a_damaged_segment_is_named_and_other_rows_are_given(
    sorter: Sorter, tmp_path: Path, damage
) -> None:
    error = damaged_in(sorter, tmp_path, damage)
    assert (error.table_id, error.lower_ts) == (7, 1)
    assert 1 <= error.upper_ts < 100
    assert fetched(sorter, error.upper_ts + 41, 100) == list(range(error.upper_ts + 41, 101))
    sorter.remove_table(SPAN)  # as the capture does, to pull the rows again
    sorter.add_table(SPAN, 0)
    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    assert fetched(sorter, 1, 100) == list(range(1, 101))


def test_a_large_block_that_was_cut_off_is_named(tmp_path: Path) -> None:
    sorter = opened(tmp_path, block_bytes=200_000, segment_bytes=1)
    sorter.add(SPAN, rows(1, 100, size=4000))
    sorter.resolve(SPAN, 100)
    segment = min(tmp_path.glob("*/segments/*"))
    os.truncate(segment, segment.stat().st_size - 1)
    with pytest.raises(BlockCorruptError, match=r"table 7, commit_ts 1 to .* it ends after"):
        fetched(sorter, 1, 100)
    sorter.close()


def test_a_block_that_vanished_from_the_index_is_noticed(sorter: Sorter) -> None:
    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    sorter.add(SPAN, rows(101, 100))
    sorter.resolve(SPAN, 200)
    assert len(fetched(sorter, 1, 200)) == 200
    (database,) = [store._database for store in sorter._stores]
    lost = WriteBatch()
    lost.delete(database.scan(b"", b"")[0][0])
    database.write(lost)
    with pytest.raises(RowsLostError, match="commit_ts 1 to 200: 200 rows were added") as caught:
        fetched(sorter, 1, 200)
    assert (caught.value.table_id, caught.value.lower_ts, caught.value.upper_ts) == (7, 1, 200)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_backlog_of_many_segments_keeps_no_files_open(tmp_path: Path) -> None:
    sorter = opened(tmp_path, segment_bytes=1)
    before = open_files()
    for first in range(1, 3001, 10):
        sorter.add(SPAN, rows(first, 10))
        sorter.resolve(SPAN, first + 9)
    assert sorter.stats().segments > 200
    batches = sorter.fetch(SPAN, Position(1, 0), Position.fence(3000))
    assert open_files() < before + 10
    sorter.clean(SPAN, Position.fence(3000))
    assert [ts for batch in batches for ts in batch.column(0).to_pylist()] == list(range(1, 3001))
    assert open_files() < before + 10
    sorter.close()


def test_rows_that_are_held_keep_no_files_open(tmp_path: Path) -> None:
    sorter = opened(tmp_path, block_bytes=128 << 10, segment_bytes=1)
    for ts in range(1, 41):
        sorter.add(SPAN, raw_batch([ts], [0], [INSERT], [b"k"], [bytes(256 << 10)], [None]))
        sorter.resolve(SPAN, ts)
    before = open_files()
    held = list(sorter.fetch(SPAN, Position(1, 0), Position.fence(40)))
    assert len(held) == 40
    assert open_files() < before + 10
    sorter.close()


KILLED = """
import sys, time
from pathlib import Path
from tests.unit.sorter.test_faults import SPAN, opened, rows
sorter = opened(Path(sys.argv[1]), memory_bytes=1)
sorter.add(SPAN, rows(1, 100))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_that_a_restart_trips_over(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"ready\n"
        with pytest.raises(DirectoryLockedError, match="in use"):
            Sorter(tmp_path)
        assert list(tmp_path.glob("*/segments/*"))
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    (tmp_path / "00" / "index" / "CURRENT").write_text("torn")
    sorter = opened(tmp_path)
    assert list(tmp_path.glob("*/segments/*")) == []
    sorter.add(SPAN, rows(1, 100))
    sorter.resolve(SPAN, 100)
    assert fetched(sorter, 1, 100) == list(range(1, 101))
    sorter.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusableError, match="file"):
        Sorter(tmp_path / "file")


@pytest.mark.parametrize("call", ["open_shards", "shutil.rmtree"])
def test_a_sorter_that_could_not_be_opened_leaves_its_directory_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("it is gone")

    Sorter(tmp_path).close()
    with monkeypatch.context() as patch:
        patch.setattr(f"sorter.engine.{call}", refuse)
        with pytest.raises((OSError, DirectoryUnusableError)) as raised:
            Sorter(tmp_path)
    Sorter(tmp_path).close()
    assert raised.tb, "while the error is still held"
