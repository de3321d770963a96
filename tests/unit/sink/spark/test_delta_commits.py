"""Versions of a Delta table on a disk of this machine: made once, by hard links, and durable."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.delta.files import DeletionVectors
from pyspark_tidemark.lake.delta.log import check_whole, commit_info, commit_on_disk, settle

ADD = {"path": "part-1.parquet", "partitionValues": {}, "size": 1}


@pytest.fixture
def table(tmp_path):
    """A table's directory, with a data file."""
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "part-1.parquet").write_bytes(b"rows")
    return tmp_path


def log_names(table):
    return sorted(path.name for path in (table / "_delta_log").iterdir())


def test_a_version_is_made_once_and_leaves_nothing_else(table):
    actions = [{"txn": {"appId": "a", "version": 1}}, {"add": ADD}]
    assert commit_on_disk(str(table), 3, actions) is True
    assert commit_on_disk(str(table), 3, [{"add": ADD}]) is False
    assert log_names(table) == ["00000000000000000003.json"]
    lines = (table / "_delta_log" / "00000000000000000003.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == actions


def test_of_many_writers_one_makes_the_version(table):
    with ThreadPoolExecutor(8) as threads:
        made = [
            threads.submit(commit_on_disk, str(table), 0, [{"txn": {"version": number}}])
            for number in range(64)
        ]
        won = [number for number, each in enumerate(made) if each.result()]
    assert len(won) == 1
    text = (table / "_delta_log" / "00000000000000000000.json").read_text()
    assert json.loads(text) == {"txn": {"version": won[0]}}
    assert log_names(table) == ["00000000000000000000.json"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_nothing_is_written(table, monkeypatch, code):
    def refused(*_):
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refused)
    assert commit_on_disk(str(table), 0, [{"add": ADD}]) is None
    assert log_names(table) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(table, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        commit_on_disk(str(table), 0, [{"add": ADD}])
    assert log_names(table) == []


def test_the_checksum_of_a_failed_attempt_is_not_left_beside_the_version(table):
    (table / "_delta_log" / ".00000000000000000000.json.crc").write_bytes(b"of other bytes")
    assert commit_on_disk(str(table), 0, [{"add": ADD}])
    assert log_names(table) == ["00000000000000000000.json"]


@pytest.fixture
def steps(monkeypatch):
    """What became durable, and which names were made, in order."""
    found = []
    fsync, link = os.fsync, os.link

    def synced(descriptor):
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def linked(source, target):
        link(source, target)
        found.append("link")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    return found


def test_all_that_a_version_names_is_durable_before_it_and_it_before_the_return(table, steps):
    """A manifest's row is on disk; after a power cut the tables were older than it said."""
    vectors = DeletionVectors(str(table))
    vector = vectors.add(np.array([0]))
    vectors.close()
    (vector_file,) = table.glob("deletion_vector_*")
    assert commit_on_disk(str(table), 0, [{"add": ADD | {"deletionVector": vector}}])
    before, after = steps[: steps.index("link")], steps[steps.index("link") + 1 :]
    assert {"part-1.parquet", vector_file.name, table.name} < set(before)
    assert before[-1].endswith(".tmp")
    # The first version: the directories are new as well.
    assert after[:2] == ["_delta_log", table.name]
    del steps[:]
    assert commit_on_disk(str(table), 1, [{"txn": {"version": 1}}])
    assert steps[1:] == ["link", "_delta_log"]


def test_what_spark_has_put_there_is_made_durable_with_the_files_that_it_adds(table, steps):
    log = table / "_delta_log"
    gone, elsewhere = {"path": "gone.parquet"}, {"path": "file:/other/part.parquet"}
    encoded = {"path": "k=a%2520b/part-2.parquet"}
    (table / "k=a%20b").mkdir()
    (table / "k=a%20b" / "part-2.parquet").write_bytes(b"")
    for version, adds in enumerate([[ADD], [encoded, gone], [elsewhere]]):
        text = "\n".join(json.dumps({"add": add}) for add in adds)
        (log / f"{version:020}.json").write_text(text)
    settle(str(table), 0)
    assert "part-1.parquet" not in steps
    assert {"part-2.parquet", "k=a%20b", f"{1:020}.json", f"{2:020}.json"} < set(steps)
    assert steps[-1] == "_delta_log"
    del steps[:]
    settle(str(table), 2)
    assert steps == []


def test_a_commit_that_was_cut_off_is_damage_wherever_that_was(table):
    info = commit_info("CUT", {"end_ts": "1"}, -1)
    commit_on_disk(str(table), 0, [info, {"txn": {"appId": "a", "version": 1}}, {"add": ADD}])
    path = table / "_delta_log" / f"{0:020}.json"
    check_whole(str(table))
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # without the last line's end nothing is missing
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"ErrLakeDamaged.*0\.json is no whole commit"):
            check_whole(str(table))


@pytest.mark.parametrize("info", [{}, {"operationMetrics": None}, {"operationMetrics": {"n": "1"}}])
def test_a_commit_that_does_not_count_its_actions_is_whole_when_its_last_line_is(table, info):
    path = table / "_delta_log" / f"{0:020}.json"
    path.write_text("\n".join(map(json.dumps, [{"commitInfo": info}, {"add": ADD}])))
    check_whole(str(table))


def test_what_is_behind_a_checkpoint_and_what_is_no_commit_is_not_looked_at(table):
    log = table / "_delta_log"
    for version in range(4):
        commit_on_disk(str(table), version, [{"add": ADD}])
    for name in (f"{4:020}.json.tmp", "foo.json", f"{9:020}.crc"):
        (log / name).write_bytes(b"")
    (log / f"{1:020}.json").write_bytes(b"")
    (log / f"{2:020}.checkpoint.parquet").write_bytes(b"")
    check_whole(str(table))
    (log / f"{3:020}.json").write_bytes(b"")
    with pytest.raises(SourceError, match="ErrLakeDamaged"):
        check_whole(str(table))
    with pytest.raises(SourceError, match="ErrLakeDamaged"):
        settle(str(table), 2)
