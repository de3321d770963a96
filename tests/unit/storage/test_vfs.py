import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.vfs import FS, RealFS
from tests.hooked_fs import HookedFS, fail_nth
from tests.memory_fs import MemFS

DIRECTORY = Path("/log")


def opened_memory() -> MemFS:
    fs = MemFS()
    fs.make_directories(DIRECTORY)
    return fs


@pytest.mark.parametrize(
    "make", [lambda path: (RealFS(), path), lambda path: (opened_memory(), DIRECTORY)]
)
def test_both_file_systems_behave_alike(tmp_path: Path, make) -> None:
    fs: FS
    fs, directory = make(tmp_path / "deep" / "er")
    fs.make_directories(directory)
    fs.make_directories(directory)
    file = fs.create(directory / "a")
    assert file.append(b"hello ") == 6
    assert fs.open(directory / "a").append(memoryview(b"world")) == 5
    assert (file.read(4, 4), file.read(9, 100), file.read(50, 1)) == (b"o wo", b"ld", b"")
    file.truncate(5)
    file.append(b"!")
    file.sync()
    assert (file.size(), file.read(0, 10)) == (6, b"hello!")
    fs.create(directory / "b").close()
    fs.sync_directory(directory)
    assert fs.names(directory) == ["a", "b"]
    fs.remove(directory / "b")
    assert fs.names(directory) == ["a"]
    assert fs.available_bytes(directory) > 0
    with pytest.raises(FileExistsError):
        fs.create(directory / "a")
    with pytest.raises(FileNotFoundError):
        fs.open(directory / "b")
    with pytest.raises(FileNotFoundError):
        fs.remove(directory / "b")
    with pytest.raises(FileNotFoundError):
        fs.create(directory / "missing" / "c")
    file.close()


def test_a_crash_forgets_names_whose_directory_was_not_synced() -> None:
    fs = opened_memory()
    file = fs.create(DIRECTORY / "a")
    file.append(b"x")
    file.sync()
    assert fs.crash_clone().names(DIRECTORY) == []
    fs.sync_directory(DIRECTORY)
    fs.remove(DIRECTORY / "a")
    assert fs.crash_clone().names(DIRECTORY) == ["a"]
    fs.sync_directory(DIRECTORY)
    assert fs.crash_clone().names(DIRECTORY) == []


@given(synced=st.binary(max_size=50), unsynced=st.binary(max_size=50), torn=st.integers(0, 60))
def test_a_crash_keeps_synced_bytes_and_at_most_the_torn_ones(
    synced: bytes, unsynced: bytes, torn: int
) -> None:
    fs = opened_memory()
    file = fs.create(DIRECTORY / "a")
    fs.sync_directory(DIRECTORY)
    file.append(synced)
    file.sync()
    file.append(unsynced)
    after = fs.crash_clone(torn).open(DIRECTORY / "a")
    assert after.read(0, 200) == synced + unsynced[:torn]


def test_a_truncation_that_was_not_synced_is_undone_by_a_crash() -> None:
    fs = opened_memory()
    file = fs.create(DIRECTORY / "a")
    fs.sync_directory(DIRECTORY)
    file.append(b"abc")
    file.sync()
    file.truncate(1)
    assert fs.crash_clone(10).open(DIRECTORY / "a").read(0, 9) == b"abc"


def test_a_hook_fails_exactly_the_nth_call() -> None:
    fs = HookedFS(opened_memory(), fail_nth("append", 2, errno.ENOSPC))
    file = fs.create(DIRECTORY / "a")
    assert file.append(b"1") == 1
    with pytest.raises(OSError, match="No space left"):
        file.append(b"2")
    assert file.append(b"3") == 1
    assert file.read(0, 9) == b"13"


def test_a_hook_makes_a_write_short() -> None:
    fs = HookedFS(opened_memory(), lambda call, path: 2 if call == "append" else None)
    file = fs.create(DIRECTORY / "a")
    assert (file.append(b"12345"), file.size()) == (2, 2)
