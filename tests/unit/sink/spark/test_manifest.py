import dataclasses
from pathlib import Path

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord, Shown, TableCut, versions_at
from pyspark_tidemark.lake.fencing import BEGUN, Lock
from pyspark_tidemark.lake.files import LocalFiles
from pyspark_tidemark.lake.manifest import DIRECTORY, ROLL_UP_FILES, FileManifest

GOLDEN = Path(__file__).parents[3] / "golden" / "lake_manifest_v1.json"
RECORD = CutRecord(
    "bank",
    400,
    450,
    3,
    "2026-01-02T03:04:05.678+00:00",
    (TableCut("bank.accounts", 7, 12), TableCut("bank.t", 0, 1)),
)


def test_the_document_is_as_written_down():
    assert RECORD.to_json() + "\n" == GOLDEN.read_text(encoding="utf-8")
    assert CutRecord.from_json(GOLDEN.read_text(encoding="utf-8")) == RECORD


def test_a_committed_cut_is_found_again(tmp_path):
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        assert manifest.last is None
        manifest.commit(RECORD)
        manifest.commit(dataclasses.replace(RECORD, start_ts=450, end_ts=1000))
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        assert manifest.last is not None
        assert manifest.last.end_ts == 1000


def test_cuts_leave_no_gap(tmp_path):
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        manifest.commit(RECORD)
        with pytest.raises(SourceError, match="ErrCutGap"):
            manifest.commit(dataclasses.replace(RECORD, start_ts=451, end_ts=500))


def test_a_cut_that_a_job_died_in_ends_where_it_was_to_end(tmp_path):
    """This failed: it could end earlier, while tables held all of it, and readers of the new cut
    saw these ahead of the others.
    """

    def opened():
        return FileManifest.opened(str(tmp_path), "bank")

    with opened() as manifest:
        assert manifest.announce(400, 450) == 450
    with opened() as manifest:
        assert manifest.announce(400, 420) == 450
    with opened() as manifest:
        assert manifest.announce(400, 600) == 450
        # The captures do not offer that cut any more.
        assert manifest.announce(400, 610, moved=True) == 610
    with opened() as manifest:
        assert manifest.announce(400, 420) == 610
        manifest.commit(dataclasses.replace(RECORD, start_ts=400, end_ts=610))
        assert manifest.announce(610, 620) == 620
    with opened() as manifest:
        assert manifest.announce(610, 700) == 620


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "end_ts": 5}'])
def test_a_cut_that_was_begun_and_cannot_be_read_is_told(tmp_path, text):
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        (tmp_path / DIRECTORY / BEGUN).write_text(text, encoding="utf-8")
        with pytest.raises(SourceError, match="ErrManifestCorrupt"):
            manifest.announce(400, 450)


def test_what_the_newest_cut_shows_is_read_from_the_newest_roll_up_on(tmp_path):
    files = CountedFiles(tmp_path)
    manifest = FileManifest(files, Lock(files), None)
    ends = range(1, 2 * ROLL_UP_FILES + 4)
    for end in ends:
        name = "bank.first" if end == 1 else "bank.busy"
        tables = (TableCut(name, 1, end, "0123456789abcdef"),)
        manifest.commit(dataclasses.replace(RECORD, start_ts=end - 1, end_ts=end, tables=tables))
        manifest.roll_up()
    del files.seen[:]
    assert manifest.shown() == {"bank.first": Shown(1, 0), "bank.busy": Shown(ends[-1], ends[-1])}
    assert len(files.seen) == 4
    assert [cut.end_ts for cut in manifest.each_cut()] == list(ends)


def test_all_cuts_are_read_once_while_their_files_are_rolled_up(tmp_path):
    files = LocalFiles(tmp_path)
    manifest = FileManifest(files, Lock(files), None)
    for end in range(1, ROLL_UP_FILES + 1):
        manifest.commit(dataclasses.replace(RECORD, start_ts=end - 1, end_ts=end))
    seen = []
    for cut in manifest.each_cut():
        seen.append(cut.end_ts)
        if cut.end_ts == 7:
            manifest.roll_up()
    assert sorted({*seen}) == list(range(1, ROLL_UP_FILES + 1))
    assert seen == sorted(seen)


def test_a_lake_has_one_writer(tmp_path):
    with (
        FileManifest.opened(str(tmp_path), "bank"),
        pytest.raises(SourceError, match="ErrTargetBusy"),
        FileManifest.opened(str(tmp_path), "bank"),
    ):
        pass


def test_a_lake_belongs_to_one_changefeed(tmp_path):
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        manifest.commit(RECORD)
    with (
        pytest.raises(SourceError, match="ErrTargetForeign"),
        FileManifest.opened(str(tmp_path), "other"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "tables": []}'])
def test_a_broken_manifest_is_told(tmp_path, text):
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / f"{5:020d}.json").write_text(text, encoding="utf-8")
    with (
        pytest.raises(SourceError, match="ErrManifestCorrupt"),
        FileManifest.opened(str(tmp_path), "bank"),
    ):
        pass


def test_a_repaired_cut_is_the_newest_one_beside_its_roll_up_too(tmp_path):
    ends = range(1, ROLL_UP_FILES + 1)
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        for end in ends:
            manifest.commit(dataclasses.replace(RECORD, start_ts=end - 1, end_ts=end))
        manifest.roll_up()
        repaired = dataclasses.replace(manifest.last, tables=(TableCut("bank.accounts", 7, 99),))
        manifest.replace(repaired)
        assert manifest.last == manifest.cuts()[-1] == repaired
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        assert manifest.last == repaired
        assert [cut.end_ts for cut in manifest.cuts()] == list(ends)
        with pytest.raises(AssertionError, match="never taken back"):
            manifest.replace(RECORD)


class CountedFiles(LocalFiles):
    """Notes which files are read."""

    def __init__(self, directory):
        super().__init__(directory)
        self.seen = []

    def read(self, name):
        self.seen.append(name)
        return super().read(name)


def test_a_roll_up_names_all_tables_and_reads_of_the_older_ones_the_newest_only(tmp_path):
    """After two busy days it read a hundred thousand cuts, and the lake waited for it."""
    files, last = CountedFiles(tmp_path), None
    manifest = FileManifest(files, Lock(files), None)
    for end in range(1, 4 * ROLL_UP_FILES + 1):
        name = "bank.first" if end == 1 else "bank.busy"
        tables = (TableCut(name, 1, end),)
        manifest.commit(dataclasses.replace(RECORD, start_ts=end - 1, end_ts=end, tables=tables))
        if end % ROLL_UP_FILES == 0:
            del files.seen[:]
            manifest.roll_up()
            assert [name for name in files.seen if "-" in name] == ([last] if last else [])
            last = files.names()[-1]
    files.remove(files.names()[:-1])
    cuts = manifest.cuts()
    assert len(cuts) == ROLL_UP_FILES
    begin = cuts[0].end_ts
    assert versions_at(cuts, begin) == {"bank.first": 1, "bank.busy": begin}
