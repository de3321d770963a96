import contextlib
import errno
import os
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import value_log
from storage.record import RecordCorruptError
from storage.value_log import (
    Pointer,
    SegmentMissingError,
    Skipped,
    ValueLog,
    ValueLogOpenError,
    ValueLogWriteError,
)
from storage.vfs import FS, RealFS
from tests.hooked_fs import HookedFS, fail_nth
from tests.memory_fs import MemFS

DIRECTORY = Path("/data/value")
START = Pointer(0, 0, 0)
GOLDEN = Path(__file__).parents[2] / "golden" / "value_log_segment.hex"


def ts_of(payload: bytes) -> int:
    return int(payload.split(b":")[0])


def opened(fs: FS, segment_bytes: int = 1 << 20, directory: Path = DIRECTORY) -> ValueLog:
    return ValueLog(fs, directory, ts_of=ts_of, segment_bytes=segment_bytes)


def append(log: ValueLog, *payloads: bytes) -> list[Pointer]:
    return log.append(payloads, max(map(ts_of, payloads)))


def content(log: ValueLog, start: Pointer = START) -> list[bytes]:
    return [item[1] for item in log.scan(start) if not isinstance(item, Skipped)]


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=12),
    st.integers(1, 300),
)
def test_what_was_appended_is_read_scanned_and_reopened(
    groups: list[list[bytes]], segment_bytes: int
) -> None:
    fs = MemFS()
    log = opened(fs, segment_bytes)
    written: list[tuple[Pointer, bytes]] = []
    for number, group in enumerate(groups):
        payloads = [b"%d:" % number + payload for payload in group]
        written += zip(append(log, *payloads), payloads, strict=True)
    for check in (log, opened(fs, segment_bytes)):
        assert list(check.scan(START)) == written
        assert [check.read(pointer) for pointer, _ in written] == [
            payload for _, payload in written
        ]
        assert check.skipped == []
    for position, (pointer, _) in enumerate(written):
        assert list(log.scan(pointer)) == written[position:]


def test_segments_rotate_by_size_and_keep_their_max_ts() -> None:
    fs = MemFS()
    log = opened(fs, segment_bytes=40)
    for ts in (5, 9, 7, 2):
        append(log, b"%d:twenty-six bytes to fill" % ts)
    assert log.segments() == {0: 5, 1: 9, 2: 7, 3: 2}
    assert log.end == Pointer(3, 66, 0)
    reopened = opened(fs, segment_bytes=40)
    assert reopened.segments() == log.segments()
    assert append(reopened, b"11:x")[0] == Pointer(4, 0, 20)
    assert reopened.size_bytes() == 4 * 66 + 20


def test_closing_finalises_a_large_segment_and_continues_a_small_one() -> None:
    fs = MemFS()
    for payload, fid in ((b"1:small", 0), (b"2:%s" % bytes(1 << 20), 0), (b"3:next", 1)):
        log = opened(fs, 1 << 30)
        assert append(log, payload)[0].fid == fid
        log.close()


def test_max_ts_of_an_unfinished_segment_is_learnt_from_its_records() -> None:
    fs = MemFS()
    append(opened(fs), b"3:a", b"8:b", b"4:c")
    assert opened(fs).segments() == {0: 8}


def test_a_segment_file_is_the_documented_bytes() -> None:
    fs = MemFS()
    log = opened(fs)
    append(log, b"470606556617768960:first", b"470606556618555392:second")
    log.rotate()
    data = fs.open(DIRECTORY / "000000.vlog").read(0, 1000)
    assert data.hex() == "".join(GOLDEN.read_text().split())


def test_a_golden_segment_stays_readable() -> None:
    fs = MemFS()
    fs.make_directories(DIRECTORY)
    fs.create(DIRECTORY / "000000.vlog").append(bytes.fromhex("".join(GOLDEN.read_text().split())))
    log = opened(fs)
    assert log.segments() == {0: 470606556618555392}
    assert content(log) == [b"470606556617768960:first", b"470606556618555392:second"]


class Recorder:
    """Appends groups to a log and, at every durability-relevant call,
    checks what a crash there would leave.
    """

    def __init__(self, torn_bytes: int) -> None:
        self.memory = MemFS()
        self.acknowledged: list[tuple[Pointer, bytes]] = []
        self.in_flight: list[bytes] = []
        self.torn_bytes = torn_bytes
        self.crashes = 0
        self.fs = HookedFS(self.memory, self.crash)

    def crash(self, call: str, path: Path) -> None:
        if call in ("read", "open"):
            return
        self.crashes += 1
        after = self.memory.crash_clone(self.torn_bytes)
        log = opened(after, 60)
        assert [log.read(pointer) for pointer, _ in self.acknowledged] == [
            payload for _, payload in self.acknowledged
        ]
        found = content(log)
        acknowledged = [payload for _, payload in self.acknowledged]
        assert found[: len(acknowledged)] == acknowledged
        assert found[len(acknowledged) :] == self.in_flight[: len(found) - len(acknowledged)]
        again = append(log, b"99:after")
        assert content(opened(after, 60))[len(found) :] == [b"99:after"]
        assert log.read(again[0]) == b"99:after"

    def run(self, groups: list[list[bytes]]) -> None:
        log = opened(self.fs, 60)
        for group in groups:
            self.in_flight = group
            pointers = append(log, *group)
            self.acknowledged += zip(pointers, group, strict=True)
            self.in_flight = []
        self.crash("end", DIRECTORY)


payload_groups = st.lists(
    st.lists(st.binary(max_size=30).map(lambda data: b"7:" + data), min_size=1, max_size=3),
    min_size=1,
    max_size=5,
)


@given(payload_groups, st.integers(0, 80))
def test_an_acknowledged_append_survives_a_crash_at_any_moment(
    groups: list[list[bytes]], torn_bytes: int
) -> None:
    recorder = Recorder(torn_bytes)
    recorder.run(groups)
    assert recorder.crashes > len(groups)


@given(
    payload_groups,
    st.sampled_from(["append", "sync", "create", "sync_directory", "truncate"]),
    st.integers(1, 8),
    st.sampled_from([errno.ENOSPC, errno.EIO]),
)
def test_a_failed_call_loses_only_its_own_group(
    groups: list[list[bytes]], call: str, nth: int, code: int
) -> None:
    memory = MemFS()
    memory.make_directories(DIRECTORY)
    log = opened(HookedFS(memory, fail_nth(call, nth, code)), 60)
    acknowledged: list[tuple[Pointer, bytes]] = []
    for group in groups:
        with contextlib.suppress(ValueLogWriteError):
            acknowledged += zip(append(log, *group), group, strict=True)
    assert list(log.scan(START)) == acknowledged
    reopened = opened(memory.crash_clone())
    assert [reopened.read(pointer) for pointer, _ in acknowledged] == [
        payload for _, payload in acknowledged
    ]


def test_short_writes_are_completed() -> None:
    log = opened(HookedFS(MemFS(), lambda call, path: 3 if call == "append" else None))
    assert log.read(append(log, b"1:a long payload")[0]) == b"1:a long payload"


def test_a_full_disk_is_one_clear_error_and_passes() -> None:
    full = True

    def hook(call: str, path: Path) -> int | None:
        if call == "append" and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None

    log = opened(HookedFS(MemFS(), hook))
    for _ in range(3):
        with pytest.raises(
            ValueLogWriteError, match=r"000000.vlog: No space left on device; nothing of this group"
        ):
            append(log, b"1:a")
    full = False
    assert append(log, b"2:b") == [Pointer(0, 0, 19)]
    assert content(log) == [b"2:b"]


def test_half_a_write_before_a_full_disk_is_cut_back() -> None:
    takes = iter([5, None])

    def hook(call: str, path: Path) -> int | None:
        if call != "append":
            return None
        taken = next(takes, -1)
        if taken is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None if taken == -1 else taken

    memory = MemFS()
    log = opened(HookedFS(memory, hook))
    with pytest.raises(ValueLogWriteError):
        append(log, b"1:lost")
    append(log, b"2:kept")
    assert content(opened(memory)) == [b"2:kept"]
    assert opened(memory).skipped == []


def test_a_torn_tail_is_cut_off_and_reported() -> None:
    fs = MemFS()
    append(opened(fs), b"1:whole")
    fs.open(DIRECTORY / "000000.vlog").append(b"\xa7\xd4\xb1\x70 torn")
    log = opened(fs)
    assert log.skipped == [Skipped(0, 23, 9, torn=True)]
    append(log, b"2:next")
    assert content(opened(fs)) == [b"1:whole", b"2:next"]
    assert opened(fs).skipped == []


def test_damage_before_good_records_is_kept_passed_over_and_reported() -> None:
    fs = MemFS()
    pointers = append(opened(fs), b"1:first", b"2:second", b"3:third")
    fs.open(DIRECTORY / "000000.vlog").content[pointers[1].offset + 20] ^= 4
    log = opened(fs)
    assert log.skipped == [Skipped(*pointers[1], torn=False)]
    assert list(log.scan(START)) == [
        (pointers[0], b"1:first"),
        Skipped(*pointers[1], torn=False),
        (pointers[2], b"3:third"),
    ]
    with pytest.raises(RecordCorruptError):
        log.read(pointers[1])


def test_dropping_a_segment_gives_its_space_back_and_reads_of_it_say_so() -> None:
    fs = MemFS()
    log = opened(fs, segment_bytes=1)
    first, second = append(log, b"1:a"), append(log, b"2:b")
    assert log.read(first[0]) == b"1:a"
    log.drop(0)
    log.drop(0)
    assert fs.crash_clone().names(DIRECTORY) == ["000001.vlog"]
    assert log.read(second[0]) == b"2:b"
    with pytest.raises(SegmentMissingError, match=r"000000.vlog is missing"):
        log.read(first[0])
    with pytest.raises(SegmentMissingError):
        list(log.scan(first[0]))
    with pytest.raises(AssertionError, match="current segment"):
        log.drop(1)


@pytest.mark.parametrize("call", ["remove", "sync_directory"])
def test_a_segment_that_cannot_be_dropped_can_be_dropped_again(call: str) -> None:
    is_broken = False

    def hook(name: str, _path: Path) -> int | None:
        if is_broken and name == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    memory = MemFS()
    log = opened(HookedFS(memory, hook), segment_bytes=1)
    append(log, b"1:a")
    append(log, b"2:b")
    is_broken = True
    with pytest.raises(ValueLogWriteError, match=r"cannot remove .*000000.vlog"):
        log.drop(0)
    assert list(log.segments()) == [0, 1]
    is_broken = False
    log.drop(0)
    assert list(log.segments()) == [1]
    assert memory.crash_clone().names(DIRECTORY) == ["000001.vlog"]


def test_half_a_footer_is_no_damage() -> None:
    takes = iter([None, 5, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def hook(call: str, _path: Path) -> int | None:
        taken = next(takes, None) if call == "append" else None
        if isinstance(taken, OSError):
            raise taken
        return taken

    memory = MemFS()
    log = opened(HookedFS(memory, hook))
    append(log, b"1:kept")
    log.rotate()
    append(log, b"2:next")
    reopened = opened(memory)
    assert reopened.skipped == []
    assert content(reopened) == [b"1:kept", b"2:next"]


def test_a_lost_segment_is_an_error_not_an_empty_log() -> None:
    fs = MemFS()
    log = opened(fs, segment_bytes=1)
    pointers = [append(log, b"%d:x" % ts)[0] for ts in range(4)]
    fs.remove(DIRECTORY / "000002.vlog")
    with pytest.raises(SegmentMissingError):
        list(opened(fs, 1).scan(pointers[1]))
    empty = opened(MemFS())
    assert content(empty) == []
    with pytest.raises(SegmentMissingError):
        content(empty, pointers[1])


def test_many_segments_need_few_open_files(tmp_path: Path) -> None:
    log = opened(RealFS(), 1, tmp_path)
    pointers = [append(log, b"%d:x" % ts)[0] for ts in range(200)]
    assert [log.read(pointer) for pointer in pointers] == [b"%d:x" % ts for ts in range(200)]
    assert len(list(Path("/proc/self/fd").iterdir())) < 150
    log.close()


def test_the_log_lives_on_a_real_disk(tmp_path: Path) -> None:
    log = opened(RealFS(), 100, tmp_path / "value")
    payloads = [b"%d:%s" % (ts, b"x" * ts) for ts in range(50)]
    pointers = [append(log, payload)[0] for payload in payloads]
    log.close()
    reopened = opened(RealFS(), 100, tmp_path / "value")
    assert [reopened.read(pointer) for pointer in pointers] == payloads
    reopened.drop(0)
    reopened.close()


@pytest.mark.parametrize("path", ["file/value", "file"])
def test_an_unusable_directory_is_one_clear_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueLogOpenError, match="cannot open the value log in"):
        opened(RealFS(), directory=tmp_path / path)


def test_without_sync_nothing_is_synced() -> None:
    calls: list[str] = []
    log = ValueLog(
        HookedFS(MemFS(), lambda call, path: calls.append(call)), DIRECTORY, ts_of=ts_of, sync=False
    )
    append(log, b"1:a")
    assert "sync" not in calls


@given(
    st.lists(st.binary(max_size=60), min_size=1, max_size=40),
    st.integers(1, 600),
    st.integers(0, 80),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_many_reads_at_once_are_the_same_as_one_by_one(
    payloads: list[bytes], segment_bytes: int, near_bytes: int, run_bytes: int, random: Random
) -> None:
    log = opened(MemFS(), segment_bytes)
    pointers = [append(log, b"1:" + payload)[0] for payload in payloads]
    asked = random.choices(pointers, k=random.randrange(2 * len(pointers)))
    with mock.patch.multiple(value_log, _NEAR_BYTES=near_bytes, _RUN_BYTES=run_bytes):
        assert log.read_many(asked) == [log.read(pointer) for pointer in asked]


def test_records_that_stand_together_are_one_read() -> None:
    reads = 0

    def hook(call: str, _: Path) -> None:
        nonlocal reads
        reads += call == "read"

    log = opened(HookedFS(MemFS(), hook))
    pointers = append(log, *(b"%d:%s" % (number, bytes(100)) for number in range(500)))
    assert log.read_many(pointers[::-2]) == [log.read(pointer) for pointer in pointers[::-2]]
    assert reads == 1 + 250
