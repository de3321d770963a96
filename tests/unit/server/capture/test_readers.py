"""Several readers of one changefeed: what all have, and what each may take once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.readers import (
    HOLDING,
    LET_GO,
    LOST,
    READERS_MAX,
    UNNAMED,
    KeptRange,
    ReaderInvalidError,
    ReaderNotExistsError,
    ReaderRecord,
    Readers,
    check_reader_name,
)
from storage.model.errors import CorruptError


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def readers(*names, has_lake_job=False, clock=None):
    named = dict.fromkeys(names, ReaderRecord(0))
    return Readers(named, 0, has_lake_job=has_lake_job, clock=clock or Clock())


def states(some, kept_ts=0):
    return {each.name: each.state for each in some.states(kept_ts)}


def test_one_without_a_name_is_acknowledged_as_it_says():
    for has_lake_job in (True, False):
        alone = readers(has_lake_job=has_lake_job)
        assert [alone.acknowledged(UNNAMED, ts) for ts in (5, 9, 7)] == [5, 9, 7]
        assert not alone


def test_the_slowest_decides_and_what_it_took_last_is_kept():
    two = readers("a", "b")
    assert [two.acknowledged("a", ts) for ts in (10, 20, 30)] == [0, 0, 0]
    assert [two.acknowledged("b", ts) for ts in (5, 15)] == [0, 5]
    assert two.acknowledged("b", 40) == 15
    # Said again, a reader is idle, and nothing before it is taken once more.
    assert two.acknowledged("b", 40) == 20
    assert two.acknowledged("a", 30) == 30
    assert two.named() == {"a": 30, "b": 40}


def test_a_lake_job_counts_where_there_is_one():
    with_job = readers("a", has_lake_job=True)
    assert with_job.acknowledged("a", 10) == with_job.acknowledged("a", 10) == 0
    assert [with_job.acknowledged(UNNAMED, ts) for ts in (4, 4, 8)] == [0, 4, 4]
    without = readers("a")
    with pytest.raises(ReaderNotExistsError, match="has the readers a: say which"):
        without.acknowledged(UNNAMED, 4)
    with pytest.raises(ReaderNotExistsError, match="no reader 'c'; it has a"):
        without.acknowledged("c", 4)


def test_readers_come_at_the_checkpoint_and_go_with_what_they_held():
    some = readers("a")
    some.acknowledged("a", 50)
    some.add("b", 30, 30)
    some.add("b", 40, 40)
    assert some.position("b") == 30
    assert some.acknowledged("a", 60) == 30
    some.remove("b")
    assert some.acknowledged("a", 70) == 60
    with pytest.raises(ReaderNotExistsError):
        some.position("b")
    some.remove("a")
    assert some.acknowledged(UNNAMED, 80) == 80


def test_positions_that_were_saved_before_the_checkpoint_begin_at_it():
    saved = {"a": ReaderRecord(5), "b": ReaderRecord(90)}
    later = Readers(saved, 40, has_lake_job=False)
    assert later.named() == {"a": 40, "b": 90}
    later.saved(later.unsaved())
    assert not later.unsaved()
    later.restart_at(20)
    assert {name: each.ts for name, each in later.unsaved().items()} == {"a": 20, "b": 20}


@pytest.mark.parametrize("name", ["", "a b", "-a", "a--b", "ä", "x" * 65, "a/b", "../x"])
def test_names_that_cannot_be_part_of_a_key_are_refused(name):
    with pytest.raises(ReaderInvalidError):
        check_reader_name(name)


def test_the_longest_name_is_taken():
    check_reader_name("x" * 64)


def test_there_are_not_too_many():
    many = readers(*(f"r{n}" for n in range(READERS_MAX)))
    many.add("r0", 0, 0)
    with pytest.raises(ReaderInvalidError, match="at most 32"):
        many.add("one-more", 0, 0)


def test_one_that_begins_in_kept_history_holds_the_checkpoint_until_it_has_caught_up():
    some = readers("a", has_lake_job=True)
    for _ in range(2):
        some.acknowledged("a", 50)
        assert some.acknowledged(UNNAMED, 50) in (0, 50)
    some.add("late", 20, 50)
    assert some.begins_at("late", 50) == 20
    assert some.held_ts() == 20
    for ts in (60, 70):
        some.acknowledged("a", ts, KeptRange(50, 10))
        some.acknowledged(UNNAMED, ts, KeptRange(50, 10))
    assert some.record("late").behind
    assert some.acknowledged("late", 45, KeptRange(50, 10)) == 20
    assert some.acknowledged("late", 65, KeptRange(50, 10)) == 45
    assert some.record("late").behind, "what it took last is below the checkpoint"
    assert some.acknowledged("late", 70, KeptRange(50, 10)) == 60
    assert not some.record("late").behind


def test_the_position_of_one_that_is_behind_survives_a_restart_and_others_begin_at_the_checkpoint():
    some = readers("a")
    some.acknowledged("a", 60)
    some.add("late", 20, 50)
    saved = {name: ReaderRecord.from_json(each.to_json()) for name, each in some.unsaved().items()}
    again = Readers(saved, 70, has_lake_job=False)
    assert again.begins_at("a", 70) == 70
    assert again.begins_at("late", 70) == 20
    assert states(again, 70) == {"a": HOLDING, "late": LOST}
    # What it needs is gone: it is told so, and holds nobody.
    assert again.let_go(100.0, 70) == ["late"]
    assert again.held_ts() == 70
    again.acknowledged("a", 90, KeptRange(70, 70))
    assert again.acknowledged("a", 95, KeptRange(70, 70)) == 90
    assert again.begins_at("late", 90) == 20
    # Whoever starts it again above what is kept, has it again.
    assert again.acknowledged("late", 92, KeptRange(90, 70)) == 90
    assert states(again, 70)["late"] == HOLDING


def test_records_of_an_earlier_version_are_read_and_it_reads_ours():
    assert ReaderRecord.from_json(b'{"checkpoint_ts": 7}') == ReaderRecord(7)
    assert ReaderRecord(7).to_json() == b'{"checkpoint_ts": 7}'
    whole = ReaderRecord(7, behind=True, seen_s=99.0)
    assert ReaderRecord.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000),
        *(b'{"checkpoint_ts": null}', b'{"checkpoint_ts": 7, "seen_s": []}'),
    ],
)
def test_a_record_that_is_something_else_is_told_as_a_readers(value):
    with pytest.raises(CorruptError, match="a reader's record in the metadata cannot be read"):
        ReaderRecord.from_json(value)


def test_one_that_is_silent_for_too_long_lets_go_and_holds_again_when_it_comes():
    clock = Clock()
    some = readers("a", "b", clock=clock)
    some.acknowledged("a", 10)
    some.acknowledged("b", 20)
    clock.now_s += 650
    some.acknowledged("b", 30)
    assert some.acknowledged("b", 40) == 0
    assert not some.let_go(700.0, 0)
    clock.now_s += 50
    assert some.let_go(700.0, 0) == ["a"]
    assert not some.let_go(700.0, 0), "told once"
    assert states(some) == {"a": LET_GO, "b": HOLDING}
    assert some.acknowledged("b", 50) == 40
    assert some.held_ts() == 40
    assert some.begins_at("a", 40) == 10, "never moved past what it has yet to take"
    assert some.acknowledged("a", 15, KeptRange(40, 5)) == 15
    assert states(some) == {"a": HOLDING, "b": HOLDING}


def test_nobody_lets_go_before_it_could_have_come_and_one_always_holds():
    clock = Clock()
    saved = {name: ReaderRecord(9, seen_s=1.0) for name in ("a", "b")}
    some = Readers(saved, 9, has_lake_job=False, clock=clock)
    assert all(each.silent_s > 1e6 for each in some.states())
    clock.now_s += 599
    assert not some.let_go(3600.0, 0)
    clock.now_s += 2
    assert some.let_go(3600.0, 0) == ["a"]
    clock.now_s += 1e6
    assert not some.let_go(3600.0, 0), "the last one"
    with_job = Readers(saved, 9, has_lake_job=True, clock=clock)
    clock.now_s += 601
    assert sorted(with_job.let_go(3600.0, 0)) == ["a", "b"]


def test_silence_is_saved_now_and_then():
    clock = Clock()
    some = readers("a", clock=clock)
    some.saved(some.unsaved())
    clock.now_s += 30
    some.acknowledged("a", 0)
    assert not some.unsaved()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c"]),
        st.sampled_from(["ack", "add", "remove"]),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(STEPS, st.booleans())
def test_nothing_is_given_up_that_a_reader_has_yet_to_take_or_took_last(steps, has_lake_job):
    """What the sink gives up is below the acknowledgement before the last."""
    some, acked, before = readers("a", "b", has_lake_job=has_lake_job), 0, 0
    took = {name: [0, 0] for name in ("a", "b")}
    if has_lake_job:
        took[""] = [0, 0]
    for name, step, by in steps:
        if step == "add" and name:
            some.add(name, acked, acked)
            took.setdefault(name, [acked, acked])
        elif step == "remove" and took.keys() - {"", name} and name in took and name:
            some.remove(name)
            del took[name]
        elif step == "ack" and name in took:
            took[name] = [took[name][1], took[name][1] + by]
            now = some.acknowledged(name, took[name][1])
            if now > acked:
                before, acked = acked, now
        assert all(acked <= last for _, last in took.values())
        assert all(before <= previous for previous, _ in took.values())
