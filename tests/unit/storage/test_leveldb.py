from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.leveldb import (
    CorruptDatabaseError,
    DirectoryLockedError,
    DirectoryUnusableError,
    LevelDB,
)
from tests.memory_kv import MemoryKV
from tests.small_disk import fill, small_disk

keys = st.binary(min_size=1, max_size=2)
bounds = st.binary(max_size=2)
operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.dictionaries(keys, st.none() | st.binary(max_size=3), max_size=6)
        ),
        st.tuples(st.just("delete_range"), st.tuples(bounds, bounds)),
        st.tuples(st.just("scan"), st.tuples(bounds, bounds, st.booleans())),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=15,
)


@settings(max_examples=40)
@given(operations)
def test_leveldb_behaves_as_the_memory_store(
    tmp_path_factory: pytest.TempPathFactory, steps: list
) -> None:
    directory = tmp_path_factory.mktemp("db")
    database, oracle = LevelDB(directory), MemoryKV()
    for name, argument in steps:
        if name == "write":
            batch = WriteBatch()
            batch.ops.update(argument)
            database.write(batch, sync=False)
            oracle.write(batch, sync=False)
        elif name == "delete_range":
            assert database.delete_range(*argument) == oracle.delete_range(*argument)
        elif name == "scan":
            lower, upper, reverse = argument
            if not upper or lower <= upper:
                assert list(database.scan(lower, upper, reverse=reverse)) == list(
                    oracle.scan(lower, upper, reverse=reverse)
                )
        else:
            database.close()
            database = LevelDB(directory)
    assert list(database.scan(b"")) == list(oracle.scan(b""))
    database.close()


def test_a_snapshot_does_not_see_later_writes(tmp_path: Path) -> None:
    database = LevelDB(tmp_path)
    put(database, b"a", b"1")
    snapshot = database.snapshot()
    put(database, b"a", b"2")
    assert (snapshot.get(b"a"), database.get(b"a"), database.get(b"b")) == (b"1", b"2", None)
    snapshot.close()
    database.close()


def put(database: LevelDB, key: bytes, value: bytes) -> None:
    batch = WriteBatch()
    batch.put(key, value)
    database.write(batch, sync=True)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    database = LevelDB(tmp_path)
    with pytest.raises(DirectoryLockedError, match="in use by another process"):
        LevelDB(tmp_path)
    database.close()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").write_text("")
    with pytest.raises(DirectoryUnusableError, match="cannot use"):
        LevelDB(tmp_path / "db")


@pytest.mark.parametrize("name", ["blocks", "missing", "corrupted"])
def test_words_of_a_path_are_taken_for_no_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "db").write_text("")
    with pytest.raises(DirectoryUnusableError, match="cannot use"):
        LevelDB(tmp_path / name / "db")
    database = LevelDB(tmp_path / name)
    with pytest.raises(DirectoryLockedError, match="already held"):
        LevelDB(tmp_path / name)
    database.close()


def test_a_lock_file_that_cannot_be_opened_is_held_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "LOCK").mkdir()
    with pytest.raises(DirectoryUnusableError, match=r"cannot use .*LOCK: Is a directory"):
        LevelDB(tmp_path)


def test_a_damaged_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    database = LevelDB(tmp_path)
    put(database, b"a", b"1")
    database.close()
    (tmp_path / "CURRENT").write_text("nonsense\n")
    before = sorted(path.name for path in tmp_path.glob("*.ldb"))
    with pytest.raises((CorruptDatabaseError, DirectoryUnusableError)):
        LevelDB(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.ldb")) == before


def test_after_a_write_that_a_full_disk_tore_none_is_taken_until_the_database_is_renewed(
    tmp_path: Path,
) -> None:
    """LevelDB takes them, behind what is torn in its log, and drops them at the next start."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        database = LevelDB(disk / "db", write_buffer_bytes=1 << 20)
        put(database, b"before", b"1")
        filler = fill(disk)
        with pytest.raises(DirectoryUnusableError, match="free some space"):
            put(database, b"torn", bytes(1 << 20))
        with pytest.raises(DirectoryUnusableError, match="free some space"):
            database.renew()
        assert database.get(b"before") == b"1"
        filler.unlink()
        with pytest.raises(DirectoryUnusableError):
            put(database, b"after", b"2")
        database.renew()
        put(database, b"after", b"2")
        database.close()
        database = LevelDB(disk / "db")
        assert [database.get(key) for key in (b"before", b"after")] == [b"1", b"2"]
        database.close()
