"""One flipped bit anywhere in the files of each of our databases: the right answer,
or an error that names it.
"""

import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from etcdpb import rpc_pb2

from sorter import Sorter, SorterSettings
from sorter.errors import BlockCorruptError, IndexLostError
from storage.kv import WriteBatch
from storage.leveldb import CorruptDatabaseError, LevelDB
from storage.leveldb_files import find_table_damage, log_damage, read_index
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import CorruptError
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span
from storage.mvcc import percolator
from storage.mvcc.engine import Engine
from storage.mvcc.prewrite import Mutation, Op, Prewrite, prewrite
from storage.mvcc.snapshot import Snapshot
from storage.pump.storage import open_pump_storage
from storage.vfs import RealFS
from tests.unit.storage.pump import storages

FLIPS = 40
ROWS = {b"%06d" % number: random.Random(number).randbytes(90) for number in range(3000)}
TABLE, LOG, MANIFEST = "*.ldb", "*.log", "MANIFEST-*"


def flip(path: Path, rng: random.Random) -> int:
    """Flip one bit of a file; returns the offset of its byte."""
    data = bytearray(path.read_bytes())
    offset = rng.randrange(len(data))
    data[offset] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return offset


def put_all(database: LevelDB, pairs: dict[bytes, bytes]) -> None:
    items = list(pairs.items())
    for at in range(0, len(items), 50):
        batch = WriteBatch()
        batch.ops.update(items[at : at + 50])
        database.write(batch, sync=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with several tables, a log and a manifest."""
    directory = tmp_path_factory.mktemp("whole") / "db"
    database = LevelDB(directory, write_buffer_bytes=64 << 10)
    put_all(database, ROWS)
    database.close()
    assert len(list(directory.glob(TABLE))) > 2
    return directory


def damaged_copies(
    whole: Path, directory: Path, pattern: str, flips: int = FLIPS
) -> Iterator[tuple[Path, Path]]:
    """Copies of a database with one bit flipped in a file of that name, and that file."""
    for seed in range(flips):
        rng = random.Random(f"{pattern} {seed}")
        copy = directory / str(seed)
        shutil.copytree(whole, copy)
        path = rng.choice([path for path in sorted(copy.rglob(pattern)) if path.stat().st_size])
        flip(path, rng)
        yield copy, path
        shutil.rmtree(copy)


def read_all(database: LevelDB) -> bool:
    """Read everything in every way; whether all of it could be read, and what could was right."""
    errors = 0
    snapshot = database.snapshot()
    for reader in (database, snapshot):
        for scanned in (reader.scan(b""), reader.scan(b"", reverse=True)):
            try:
                for key, value in scanned:
                    assert ROWS[key] == value
            except CorruptDatabaseError:
                errors += 1
        if not errors:
            assert dict(reader.scan(b"")) == ROWS
            assert dict(reader.scan(b"", reverse=True)) == ROWS
    for key in [*ROWS][::7]:
        try:
            assert database.get(key) == ROWS[key]
        except CorruptDatabaseError:
            errors += 1
    snapshot.close()
    return not errors


@pytest.mark.parametrize("pattern", [TABLE, LOG, MANIFEST, "CURRENT"])
def test_every_read_of_a_damaged_leveldb_is_right_or_an_error(
    whole: Path, tmp_path: Path, pattern: str
) -> None:
    right = 0
    for copy, _ in damaged_copies(whole, tmp_path, pattern):
        try:
            database = LevelDB(copy, write_buffer_bytes=64 << 10)
        except CorruptDatabaseError:
            continue
        right += read_all(database)
        database.close()
    assert right < FLIPS // 2


def test_the_error_names_the_damaged_file_the_place_and_the_keys(
    whole: Path, tmp_path: Path
) -> None:
    for copy, path in damaged_copies(whole, tmp_path, TABLE, 10):
        database, message = LevelDB(copy), ""
        try:
            for _ in database.scan(b""):
                """Until the damaged block, if it is not a filter that is damaged:
                then there is no error.
                """
        except CorruptDatabaseError as err:
            message = err.message
        assert not message or (f"{path} is damaged at byte" in message and "backup" in message)
        database.close()


def test_other_keys_of_a_damaged_table_are_read_on(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "db"
    shutil.copytree(whole, copy)
    table = min(copy.glob(TABLE))
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 4
    table.write_bytes(data)
    database = LevelDB(copy)
    wrong = []
    for key, value in ROWS.items():
        try:
            assert database.get(key) == value
        except CorruptDatabaseError as err:
            wrong.append((key, err.message))
    damage = find_table_damage(copy, b"", b"")
    assert damage is not None
    assert wrong
    assert all(
        damage.first_key < key <= damage.last_key and str(damage) in text for key, text in wrong
    )
    database.close()


def test_a_damaged_first_or_last_block_is_not_taken_for_the_end_of_the_data(
    whole: Path, tmp_path: Path
) -> None:
    for number, side in enumerate((0, -1)):
        copy = tmp_path / str(number)
        shutil.copytree(whole, copy)
        database = LevelDB(copy, write_buffer_bytes=64 << 10)
        database.compact(b"", b"")
        database.close()
        table = sorted(copy.glob(TABLE), key=lambda path: read_index(path)[-1].last_key)[side]
        block = read_index(table)[side]
        data = bytearray(table.read_bytes())
        data[block.offset + 9] ^= 4
        table.write_bytes(data)
        database = LevelDB(copy)
        keys = sorted(ROWS)
        inside = [key for key in keys if block.first_key < key <= block.last_key]
        for lower, upper in (
            (b"", b""),
            (inside[0], b""),
            (inside[0], inside[-1]),
            (b"", inside[-1] + b"0"),
        ):
            for reverse in (False, True):
                with pytest.raises(CorruptDatabaseError, match="damaged at byte"):
                    list(database.scan(lower, upper, reverse=reverse))
        before, after = keys[: keys.index(inside[0])], keys[keys.index(inside[-1]) + 1 :]
        if before:
            assert [key for key, _ in database.scan(b"", before[-1])] == before[:-1]
        assert [key for key, _ in database.scan(inside[-1] + b"0")] == after
        database.close()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_never_passes_over_a_damaged_block(
    whole: Path, tmp_path: Path, reverse: bool
) -> None:
    for copy, _ in damaged_copies(whole, tmp_path, TABLE, 20):
        database = LevelDB(copy)
        keys = sorted(ROWS, reverse=reverse)
        seen = []
        try:
            for key, _ in database.scan(b"", reverse=reverse):
                seen.append(key)
        except CorruptDatabaseError:
            """What came before the block came whole."""
        assert seen == keys[: len(seen)]
        database.close()


def test_a_compaction_does_not_give_a_damaged_value_a_good_checksum(
    whole: Path, tmp_path: Path
) -> None:
    for copy, _ in damaged_copies(whole, tmp_path, TABLE, 20):
        database = LevelDB(copy, write_buffer_bytes=64 << 10)
        try:
            put_all(database, dict.fromkeys(ROWS, b""))
            put_all(database, ROWS)
            database.compact(b"", b"")
        except CorruptDatabaseError:
            database.close()
            continue
        database.close()
        database = LevelDB(copy)
        read_all(database)
        database.close()


def test_a_log_cut_off_anywhere_is_no_damage_and_keeps_what_was_whole(
    whole: Path, tmp_path: Path
) -> None:
    log = next(path for path in whole.glob(LOG) if path.stat().st_size)
    data = log.read_bytes()
    rng = random.Random(3)
    for length in sorted(rng.sample(range(len(data)), 60)):
        assert log_damage(data[:length]) is None
    copy = tmp_path / "db"
    shutil.copytree(whole, copy)
    (copy / log.name).write_bytes(data[:-5])
    database = LevelDB(copy)
    kept = dict(database.scan(b""))
    assert len(ROWS) - 50 <= len(kept) < len(ROWS)
    database.close()


def test_a_damaged_length_of_the_last_record_is_not_taken_for_a_torn_write(tmp_path: Path) -> None:
    database = LevelDB(tmp_path)
    put_all(database, {b"a": b"1"})
    put_all(database, {b"b": b"2"})
    database.close()
    log = next(tmp_path.glob(LOG))
    data = log.read_bytes()
    at = 7 + int.from_bytes(data[4:6], "little")
    for bit in range(16):
        changed = bytearray(data)
        changed[at + 4 + bit // 8] ^= 1 << bit % 8
        assert log_damage(bytes(changed)) == at
    log.write_bytes(data[: at + 5] + b"\x40" + data[at + 6 :])
    with pytest.raises(CorruptDatabaseError, match=rf"{log.name} is damaged at byte {at}"):
        LevelDB(tmp_path)
    log.write_bytes(data)
    database = LevelDB(tmp_path)
    assert dict(database.scan(b"")) == {b"a": b"1", b"b": b"2"}
    database.close()


def test_the_store_reads_right_values_or_errors_and_a_command_fails_alone(tmp_path: Path) -> None:
    whole, values = tmp_path / "whole", {}
    database = LevelDB(whole, write_buffer_bytes=64 << 10)
    engine = Engine(database)
    for number in range(150):
        keys = {b"%04d-%d" % (number, at): random.Random(number).randbytes(300) for at in range(3)}
        mutations = [Mutation(Op.PUT, key, value) for key, value in keys.items()]
        txn = Prewrite(
            mutations=mutations, primary=next(iter(keys)), start_ts=10 * number + 1, ttl_ms=1
        )
        commit = partial(
            percolator.commit, keys=list(keys), start_ts=10 * number + 1, commit_ts=10 * number + 5
        )
        engine.apply([partial(prewrite, txn=txn), commit])
        engine.fence.release()
        values |= keys
    database.compact(b"", b"")
    database.close()
    errors = alone = 0
    for copy, _ in damaged_copies(whole, tmp_path, TABLE):
        database = LevelDB(copy)
        snapshot = Snapshot(database, 10**6)
        for key, value in values.items():
            try:
                assert snapshot.get(key) == value
            except CorruptDatabaseError as err:
                errors += 1
                if (
                    "with keys" not in err.message
                ):  # a whole table cannot be read, so some other keys cannot either
                    break
                txn = Prewrite(
                    mutations=[Mutation(Op.PUT, key, b"n")], primary=key, start_ts=10**6, ttl_ms=1
                )
                other = Prewrite(
                    mutations=[Mutation(Op.PUT, b"z", b"n")], primary=b"z", start_ts=10**6, ttl_ms=1
                )
                with suppress(
                    CorruptDatabaseError
                ):  # a compaction met the damage first: the store stops
                    results = (
                        Engine(database)
                        .apply([partial(prewrite, txn=txn), partial(prewrite, txn=other)])
                        .results
                    )
                    assert not isinstance(results[1], Exception)
                    alone += isinstance(results[0], CorruptDatabaseError)
                break
        database.close()
    assert errors > FLIPS // 4
    assert alone


@pytest.mark.parametrize("pattern", [TABLE, LOG, MANIFEST])
async def test_the_metadata_are_whole_or_refused(tmp_path: Path, pattern: str) -> None:
    whole = tmp_path / "whole"
    async with EmbeddedEtcd.open(whole) as server:
        for number in range(60):
            await server.put(rpc_pb2.PutRequest(key=b"k%03d" % number, value=bytes([number]) * 50))
        expected = (await server.read(rpc_pb2.RangeRequest(key=b"k", range_end=b"l"))).kvs
        if pattern == TABLE:
            await server.defragment()
    refused = 0
    for copy, _ in damaged_copies(whole, tmp_path, pattern):
        try:
            async with EmbeddedEtcd.open(copy) as server:
                assert (
                    await server.read(rpc_pb2.RangeRequest(key=b"k", range_end=b"l"))
                ).kvs == expected
        except CorruptError:
            refused += 1
    assert refused > FLIPS // 4


@pytest.mark.parametrize("pattern", [TABLE, LOG, MANIFEST, "*.vlog"])
async def test_a_pump_serves_whole_binlogs_or_names_the_damage(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.leveldb._WRITE_BUFFER_BYTES", 64 << 10)
    whole, fs = tmp_path / "whole", RealFS()
    async with open_pump_storage(fs, whole, segment_bytes=20_000) as storage:
        for ts in range(10, 1000, 10):
            await storage.write(
                [storages.prewrite(ts, b"%d" % ts * 100), storages.commit(ts, ts + 5)]
            )
        await storage.write([storages.heartbeat(2000)])
        await storages.wait_max_commit_ts(storage, 2000)
        expected = await storages.pulled(storage, 0, 2000)
    if pattern == TABLE:
        database = LevelDB(whole / "kv")
        database.compact(b"", b"")
        database.close()
    named = 0
    for copy, _ in damaged_copies(whole, tmp_path, pattern):
        try:
            async with open_pump_storage(fs, copy, segment_bytes=20_000) as storage:
                if storage.recovery.skipped:
                    named += 1
                else:
                    assert await storages.pulled(storage, 0, 2000) == expected
        except* CorruptError:
            named += 1
    assert named > FLIPS // 4


SPAN = Span(7, b"a", b"b")


def sorter_with_rows(directory: Path) -> Sorter:
    sorter = Sorter(
        directory,
        SorterSettings(memory_bytes=1 << 20, block_bytes=1024, segment_bytes=16384, shards=1),
    )
    sorter.add_table(SPAN, 0)
    for first in range(1, 1200, 30):
        ts = range(first, first + 30)
        start_ts, values = [at - 1 for at in ts], [b"%d" % at * 9 for at in ts]
        sorter.add(SPAN, raw_batch(ts, start_ts, [INSERT] * 30, [b"k"] * 30, values, [None] * 30))
        sorter.resolve(SPAN, first + 29)
    return sorter


@pytest.mark.parametrize("pattern", ["*.segment", TABLE])
def test_the_sorter_gives_right_rows_or_names_the_damaged_range(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.leveldb.Limits.__new__.__defaults__", (0, 2 << 20, 1000))
    named = 0
    sorter = sorter_with_rows(tmp_path)
    for store in sorter._stores if pattern == TABLE else ():
        store._database._kv.compact(b"", b"")
    files = sorted(tmp_path.rglob(pattern))
    assert files
    for seed in range(FLIPS):
        rng = random.Random(seed)
        path = rng.choice(files)
        before = path.read_bytes()
        with path.open("r+b") as file:
            offset = rng.randrange(len(before))
            file.seek(offset)
            file.write(bytes([before[offset] ^ 1 << rng.randrange(8)]))
        try:
            batches = list(sorter.fetch(SPAN, Position(1, 0), Position.fence(1200)))
            values = [value for batch in batches for value in batch.column("value").to_pylist()]
            assert values == [b"%d" % ts * 9 for ts in range(1, 1201)]
        except (BlockCorruptError, IndexLostError):
            named += 1
        with path.open("r+b") as file:
            file.write(before)
    sorter.close()
    assert named > FLIPS // 4
