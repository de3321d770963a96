"""Claims of a lake that several drivers can reach: taken over, announced, published, tidied."""

from pathlib import Path

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta
from pyspark_tidemark.lake import manifest as manifests
from pyspark_tidemark.lake.cut import skip
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut
from pyspark_tidemark.lake.fencing import Claim, check_idle
from pyspark_tidemark.lake.manifest import FileManifest, cuts_in

from tests.unit.sink.spark.memory_files import MemoryFiles as Memory

GOLDEN = Path(__file__).parents[3] / "golden" / "lake_claim_v1.json"


def record(start_ts, end_ts, version=1):
    return CutRecord(
        "bank",
        start_ts,
        end_ts,
        0,
        "2026-01-01T00:00:00+00:00",
        (TableCut("b.a", 1, version),),
        "upsert",
    )


@pytest.fixture
def lake():
    return Memory(), Memory()


def taken(lake):
    return FileManifest.taken(*lake, "bank", "hdfs://n/lake")


def published(lake):
    return [(cut.start_ts, cut.end_ts) for cut in cuts_in(lake[0])]


def applied(manifest, start_ts, end_ts):
    end_ts = manifest.announce(start_ts, end_ts)
    manifest.commit(record(start_ts, end_ts))
    return end_ts


def test_a_dead_drivers_lake_is_taken_over_and_its_cut_keeps_its_end(lake):
    first = taken(lake)
    applied(first, 0, 10)
    assert first.announce(10, 25) == 25
    second = taken(lake)
    assert second.last.end_ts == 10
    assert second.announce(10, 20) == 25
    second.commit(record(10, 25))
    assert second.announce(25, 30) == 30
    assert published(lake) == [(0, 10), (10, 25)]


def test_who_was_taken_over_can_neither_publish_nor_announce(lake):
    asleep, between = taken(lake), taken(lake)
    applied(between, 0, 10)
    between.announce(10, 20)
    taken(lake)
    with pytest.raises(SourceError, match=r"ErrTargetBusy.*taken this lake over"):
        between.commit(record(10, 20))
    for old in (asleep, between):
        with pytest.raises(SourceError, match="ErrTargetBusy") as caught:
            old.announce(10, 20)
        assert not caught.value.retryable, (
            "else two drivers would take the lake from each other for ever"
        )
    assert published(lake) == [(0, 10)]


def test_a_creation_whose_answer_was_lost_has_been_made(lake):
    manifest = taken(lake)
    for part in lake:
        part.lost = 1
    applied(manifest, 0, 10)
    assert published(lake) == [(0, 10)]


def test_a_repaired_cut_is_shown_and_a_begun_one_is_not_given_up_for_it(lake):
    manifest = taken(lake)
    applied(manifest, 0, 10)
    manifest.replace(record(0, 10, version=7))
    assert [cut.tables[0].version for cut in cuts_in(lake[0])] == [7]
    assert taken(lake).last == record(0, 10, version=7)
    taken(lake).announce(10, 20)
    with pytest.raises(SourceError, match="ErrRepairUnsupported"):
        taken(lake).replace(record(0, 10, version=8))


def test_claims_do_not_pile_up_but_those_that_took_over_stay(lake, monkeypatch):
    monkeypatch.setattr(manifests, "ROLL_UP_FILES", 4)
    start_ts = 0
    for _ in range(3):
        manifest = taken(lake)
        for _ in range(20):
            start_ts = applied(manifest, start_ts, start_ts + 10)
            manifest.tidy(manifests.datetime.fromisoformat("2025-01-01T00:00:00+00:00"))
    assert published(lake) == [(ts, ts + 10) for ts in range(0, start_ts, 10)]
    assert len(lake[0].found) < 10 + start_ts // 10 // 4
    assert len(lake[1].found) < 3 + 20 // 4 + 2
    assert [Claim.from_json(lake[1].found[name]).taken for name in lake[1].names()][:3] == [
        1,
        22,
        43,
    ]


def test_who_is_slow_to_take_over_does_not_begin_where_claims_were_removed(lake):
    first = taken(lake)
    applied(first, 0, 10)
    read = lake[1].read

    def slow(name):
        """Meanwhile the first goes on, and another takes over and removes what it claimed."""
        lake[1].read = read
        found = read(name)
        applied(first, 10, 20)
        applied(taken(lake), 20, 30)
        return found

    lake[1].read = slow
    with pytest.raises(SourceError, match="ErrTargetBusy"):
        taken(lake)
    assert published(lake) == [(0, 10), (10, 20), (20, 30)]


def test_who_only_repairs_leaves_a_running_job_alone(lake):
    running = taken(lake)
    check_idle(lake[1], 0.01)
    changing = iter([["1"], ["1", "2"]])
    lake[1].names = lambda: next(changing)
    with pytest.raises(SourceError, match=r"ErrTargetBusy.*stop it first"):
        check_idle(lake[1], 0.01)
    del lake[1].names
    assert running.announce(0, 10) == 10


def test_a_job_that_may_not_write_a_lake_does_not_stop_the_one_that_does(lake):
    running = taken(lake)
    applied(running, 0, 10)
    with pytest.raises(SourceError, match="ErrTargetForeign"):
        FileManifest.taken(*lake, "other", "hdfs://n/lake")
    with pytest.raises(SourceError, match="ErrTargetMode"):
        FileManifest.taken(*lake, "bank", "hdfs://n/lake", mode="scd2")
    assert applied(running, 10, 20) == 20


def test_the_claims_document_is_as_written_down():
    claim = Claim(12, "6f1c0000000000000000000000000000", "node-3", 9, 400, 450, 12)
    assert claim.to_json() == GOLDEN.read_text(encoding="utf-8")
    assert Claim.from_json(GOLDEN.read_text(encoding="utf-8")) == claim
    assert claim.published_as == "00000000000000000450_000000000012.json"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "number": 1}'])
def test_a_broken_claim_is_told(lake, text):
    lake[1].found["000000000001"] = text
    with pytest.raises(SourceError, match="ErrManifestCorrupt"):
        taken(lake)


def skipping(end_ts):
    return ChangefeedMeta(end_ts, end_ts, {}, skipped=((10, end_ts),))


def test_a_begun_cut_within_a_skipped_stretch_is_skipped_up_to_its_own_end_first(lake):
    dead = taken(lake)
    applied(dead, 0, 10)
    dead.announce(10, 25)
    manifest = taken(lake)
    assert skip(manifest, skipping(40), "upsert").skipped == ((10, 25), (25, 40))
    assert published(lake) == [(0, 10), (10, 25), (25, 40)]
    with pytest.raises(SourceError, match="ErrTargetBusy"):
        dead.commit(record(10, 25))


def test_a_begun_cut_that_ends_above_a_skipped_stretch_is_never_cut_in_two(lake):
    dead = taken(lake)
    applied(dead, 0, 10)
    dead.announce(10, 25)
    manifest = taken(lake)
    with pytest.raises(SourceError, match=r"ErrCutGap.*--overwrite-checkpoint-ts 25"):
        skip(manifest, skipping(20), "upsert")
    assert published(lake) == [(0, 10)]
    manifest = taken(lake)  # the printed way out
    assert skip(manifest, skipping(25), "upsert").end_ts == 25
    assert applied(manifest, 25, 30) == 30


@pytest.mark.parametrize("dies", ["announce", "commit"])
def test_whoever_dies_while_a_stretch_is_skipped_is_followed_by_one_that_skips_it(
    lake, dies, monkeypatch
):
    manifest = taken(lake)
    applied(manifest, 0, 10)
    step = getattr(manifest, dies)

    def dying(*arguments):
        step(*arguments)
        raise OSError("dies")

    monkeypatch.setattr(manifest, dies, dying)
    with pytest.raises(OSError, match="dies"):
        skip(manifest, skipping(40), "upsert")
    after = taken(lake)
    skip(after, skipping(40), "upsert")
    assert published(lake) == [(0, 10), (10, 40)]
    assert after.last.skipped == ((10, 40),)
