"""What a manifest says about its tables, rolled up or not, whole or after a crash."""

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import manifest as manifests
from pyspark_tidemark.lake import reading
from pyspark_tidemark.lake.cut_record import (
    CutRecord,
    TableCut,
    records,
    renamed_since,
    rolled,
    versions_at,
)
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, read_cuts
from pyspark_tidemark.lake.target import LakeConnector
from pyspark_tidemark.sink_uri import SinkUri

GOLDEN = Path(__file__).parents[3] / "golden" / "lake_manifest_rolled_v1.json"
START = datetime(2026, 1, 1, tzinfo=UTC)


def cut(number, *tables, **more):
    applied_at = (START + timedelta(minutes=number)).isoformat(timespec="milliseconds")
    found = tuple(TableCut(name, 1, version, "0123456789abcdef") for name, version in tables)
    return CutRecord(
        "bank", 10 * number - 10, 10 * number, number, applied_at, found, "upsert", **more
    )


HISTORY = [
    cut(1, ("b.a", 1), ("b.b", 1), ("b.c", 5)),
    cut(2, ("b.a", 2)),
    cut(3, ("b.b", 2), dropped=("b.c",)),
    cut(4, ("b.d", 3), renamed=(("b.a", "b.d"),)),
]


def test_tables_are_as_the_newest_cut_at_or_before_names_them():
    assert versions_at(HISTORY, 29) == {"b.a": 2, "b.b": 1, "b.c": 5}
    assert versions_at(HISTORY, 30) == {"b.a": 2, "b.b": 2}
    assert versions_at(HISTORY, 99) == {"b.d": 3, "b.b": 2}
    with pytest.raises(SourceError, match=r"ErrCutNotFound.*first cut ends at 10"):
        versions_at(HISTORY, 9)


def test_a_table_is_found_under_its_newest_name_also_where_another_one_has_its_old_name():
    chain = cut(4, ("b.v", 1), ("b.w", 1), renamed=(("b.v", "b.w"), ("b.u", "b.v")))
    cuts = [
        cut(1, ("b.u", 1)),
        cut(2, ("b.v", 1), renamed=(("b.u", "b.v"),)),
        cut(3, ("b.u", 1)),
        chain,
    ]
    now = {
        (name, ts): renamed_since(cuts, name, ts)
        for ts in (10, 20, 30, 40)
        for name in versions_at(cuts, ts)
    }
    old = {("b.u", 10): "b.w", ("b.v", 20): "b.w", ("b.u", 30): "b.v", ("b.v", 30): "b.w"}
    assert now == old | {("b.v", 40): "b.v", ("b.w", 40): "b.w"}


def test_tables_that_changed_places_are_found_where_the_other_one_was():
    moves = (("b.u", "b.x"), ("b.v", "b.u"), ("b.x", "b.v"))
    cuts = [cut(1, ("b.u", 1), ("b.v", 2)), cut(2, renamed=moves)]
    assert versions_at(cuts, 20) == {"b.v": 1, "b.u": 2}
    assert [renamed_since(cuts, name, 10) for name in ("b.u", "b.v")] == ["b.v", "b.u"]


def test_a_table_that_was_dropped_and_whose_name_went_to_another_cannot_be_read_any_more():
    cuts = [
        cut(1, ("b.a", 1), ("b.b", 1)),
        cut(2, dropped=("b.b",)),
        cut(3, renamed=(("b.a", "b.b"),)),
    ]
    assert renamed_since(cuts, "b.a", 10) == "b.b"
    with pytest.raises(SourceError, match=r"ErrCutExpired.*b\.a took the place of b\.b above 20"):
        renamed_since(cuts, "b.b", 10)


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=8),
    st.data(),
)
def test_a_roll_up_says_the_same_without_what_came_before_it(tables, data):
    cuts = [cut(number, *found.items()) for number, found in enumerate(tables, 1)]
    at = data.draw(st.integers(0, len(cuts) - 1))
    alone = rolled(cuts[:at], cuts[at:])
    for ts in range(cuts[at].end_ts, cuts[-1].end_ts + 10, 10):
        assert versions_at(alone, ts) == versions_at(cuts, ts)


def test_the_documents_are_as_written_down():
    lines = [found.to_json() for found in rolled(HISTORY[:1], HISTORY[1:])]
    assert "".join(line + "\n" for line in lines) == GOLDEN.read_text(encoding="utf-8")
    assert records(GOLDEN.read_text(encoding="utf-8").splitlines()) == rolled(
        HISTORY[:1], HISTORY[1:]
    )


@pytest.mark.parametrize("crash", [False, True])
def test_files_are_rolled_up_and_a_crash_before_the_old_ones_are_gone_is_no_harm(
    tmp_path, monkeypatch, crash
):
    monkeypatch.setattr(manifests, "ROLL_UP_FILES", 3)
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        for number in range(1, 9):
            manifest.commit(cut(number, ("b.a", number)))
        if crash:
            monkeypatch.setattr(
                Path, "unlink", lambda path: (_ for _ in ()).throw(OSError("crash"))
            )
            with pytest.raises(OSError, match="crash"):
                manifest.roll_up()
            monkeypatch.undo()
            monkeypatch.setattr(manifests, "ROLL_UP_FILES", 3)
        assert [found.end_ts for found in manifest.cuts()] == list(range(10, 90, 10))
        manifest.roll_up()
        manifest.roll_up()
    names = sorted(path.name for path in (tmp_path / DIRECTORY).glob("*.json"))
    assert names == [f"{a:020d}-{b:020d}.json" for a, b in ((10, 30), (40, 60))] + [
        f"{n:020d}.json" for n in (70, 80)
    ]
    assert [found.end_ts for found in read_cuts(tmp_path / DIRECTORY)] == list(range(10, 90, 10))
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        assert manifest.last == cut(8, ("b.a", 8))


def test_old_roll_ups_go_but_never_the_one_that_shows_the_horizon(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "ROLL_UP_FILES", 2)
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        for number in range(1, 8):
            manifest.commit(cut(number, ("b.a", number)))
        for _ in range(3):
            manifest.roll_up()
        manifest.forget(START + timedelta(minutes=5))
        kept = manifest.cuts()
    assert [found.end_ts for found in kept] == [30, 40, 50, 60, 70]
    assert versions_at(kept, 40) == {"b.a": 4}


def test_the_last_file_of_a_manifest_may_be_a_roll_up(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "ROLL_UP_FILES", 2)
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        manifest.commit(cut(1, ("b.a", 1)))
        manifest.commit(cut(2))
        manifest.tidy(START)
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        assert manifest.last.end_ts == 20
        manifest.commit(cut(3))


class CutsInMemory:
    """A manifest that counts how often it is read."""

    def __init__(self, cuts):
        self.kept, self.reads = list(cuts), 0

    @property
    def last(self):
        return self.kept[-1] if self.kept else None

    def each_cut(self):
        self.reads += 1
        yield from self.kept


class KeptAt(KeptCuts):
    """With a clock that stands."""

    horizon = START

    def at(self, horizon):
        self.horizon = horizon
        return self


def kept_versions(cuts, horizon, table):
    """Read at once, and followed from cut to cut: both must be the same."""
    at_once = KeptAt(CutsInMemory(cuts), 0.0).at(horizon).versions(table)
    manifest = CutsInMemory(cuts[:1])
    followed = KeptAt(manifest, 0.0).at(horizon)
    followed.versions(table)
    for each in cuts[1:]:
        manifest.kept.append(each)
        followed.follow()
    assert followed.versions(table) == at_once
    assert manifest.reads == 1
    return at_once


def test_of_versions_that_no_kept_cut_shows_half_are_forgotten_at_last():
    manifest = CutsInMemory([cut(1, ("b.a", 1))])
    kept = KeptAt(manifest, 0.0)
    kept.versions("b.a")
    for number in range(2, 5000):
        manifest.kept = [cut(number, ("b.a", number))]
        kept.at(START + timedelta(minutes=number - 10)).follow()
    assert kept.versions("b.a") == frozenset(range(4988, 5000))
    assert len(kept._tables["b.a"]._versions) < 30


def test_cuts_that_came_without_a_word_are_read_with_all_others():
    manifest = CutsInMemory([cut(1, ("b.a", 1))])
    kept = KeptAt(manifest, 0.0)
    kept.versions("b.a")
    manifest.kept += [cut(2, ("b.a", 2)), cut(3, ("b.a", 3))]
    assert kept.versions("b.a") == {1, 2, 3}
    assert manifest.reads == 2


def test_a_clock_that_goes_back_takes_no_version_away():
    cuts = [cut(8, ("b.a", 1)), cut(9, ("b.a", 2)), cut(10, ("b.a", 3))]
    cuts[2] = dataclasses.replace(cuts[2], applied_at=cuts[0].applied_at)
    assert kept_versions(cuts, START + timedelta(minutes=9), "b.a") == {1, 2, 3}


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.integers(0, 12))
def test_every_version_that_a_kept_cut_shows_is_kept(changed, horizon):
    cuts = [
        cut(number, *([("b.a", number)] if yes else [])) for number, yes in enumerate(changed, 1)
    ]
    kept = kept_versions(cuts, START + timedelta(minutes=horizon), "b.a")
    for number in range(max(horizon, 1), len(cuts) + 1):
        assert versions_at(cuts, 10 * number).items() <= {("b.a", version) for version in kept}


@given(
    st.lists(st.sampled_from(["change", "swap", "move", "nothing"]), max_size=12),
    st.integers(0, 14),
)
def test_a_version_that_a_kept_cut_shows_is_kept_under_the_tables_newest_name(steps, horizon):
    """This failed: VACUUM looked for the newest name only, in cuts from before the rename, too."""
    cuts, names = [cut(1, ("b.a", 100), ("b.b", 200))], ["b.a", "b.b"]
    for number, step in enumerate(steps, 2):
        old = list(names)
        if step == "swap":
            names.reverse()
        elif step == "move":
            names[0] = f"b.{number}"
        changed = [(names[0], 100 + number), (names[1], 200 + number)] if step == "change" else []
        renamed = tuple((was, now) for was, now in zip(old, names, strict=True) if was != now)
        if step == "swap":
            renamed = ((old[0], "b.free"), (old[1], names[1]), ("b.free", names[0]))
        cuts.append(dataclasses.replace(cut(number, *changed), renamed=renamed))
    for number in range(max(horizon, 1), len(cuts) + 1):
        for name, version in versions_at(cuts, 10 * number).items():
            newest = renamed_since(cuts, name, 10 * number)
            assert version in kept_versions(cuts, START + timedelta(minutes=horizon), newest)


class Counted(list):
    """Counts how often somebody goes through it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


class Names(LakeConnector):
    """Says which version of which directory is read."""

    def open_target(self, arguments, spark, manifest):
        raise NotImplementedError

    def read(self, spark, table, version):
        return table.name, version


def test_all_tables_of_a_lake_are_read_by_going_through_its_cuts_once_or_twice(monkeypatch):
    """With 57,600 cuts and 1,000 tables two minutes went by before the first one was read."""
    monkeypatch.setattr(reading, "open_connector", lambda lake_format: Names())
    cuts = Counted([cut(1, *((f"b.t{number}", number) for number in range(100))), *HISTORY[1:]])
    cuts[3] = cut(4, ("b.d", 3), renamed=(("b.t7", "b.d"),))
    uri = SinkUri.parse("delta:///lake")
    frames = reading._frames(None, uri, cuts, 30)
    assert len(frames) == 102
    assert frames["b.t7"] == ("b.d", 7)
    assert frames["b.b"] == ("b.b", 2)
    assert reading.table_frame(None, uri, cuts, "b.t8", 40) == ("b.t8", 8)
    assert cuts.passes <= 4


def test_records_of_older_jobs_have_no_checksum():
    old = dataclasses.replace(HISTORY[1], mode=None, tables=(TableCut("b.a", 1, 2),))
    assert '"mode"' not in old.to_json()
    assert '"checksum"' not in old.to_json()
    assert CutRecord.from_json(old.to_json()) == old
