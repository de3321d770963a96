"""Several readers of one changefeed: what all have, and what each may take once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.readers import (
    READERS_MAX,
    UNNAMED,
    ReaderInvalidError,
    ReaderNotExistsError,
    Readers,
    check_reader_name,
)


def readers(*names, has_lake_job=False):
    return Readers(dict.fromkeys(names, 0), 0, has_lake_job=has_lake_job)


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
    some.add("b", 30)
    some.add("b", 40)
    assert some.position("b") == 30
    assert some.acknowledged("a", 60) == 30
    some.remove("b")
    assert some.acknowledged("a", 70) == 60
    with pytest.raises(ReaderNotExistsError):
        some.position("b")
    some.remove("a")
    assert some.acknowledged(UNNAMED, 80) == 80


def test_positions_that_were_saved_before_the_checkpoint_begin_at_it():
    later = Readers({"a": 5, "b": 90}, 40, has_lake_job=False)
    assert later.named() == {"a": 40, "b": 90}
    assert later.unsaved() == {"a": 40}
    later.saved({"a": 40})
    assert not later.unsaved()
    later.restart_at(20)
    assert later.unsaved() == {"a": 20, "b": 20}


@pytest.mark.parametrize("name", ["", "a b", "-a", "a--b", "ä", "x" * 65, "a/b", "../x"])
def test_names_that_cannot_be_part_of_a_key_are_refused(name):
    with pytest.raises(ReaderInvalidError):
        check_reader_name(name)


def test_the_longest_name_is_taken():
    check_reader_name("x" * 64)


def test_there_are_not_too_many():
    many = readers(*(f"r{n}" for n in range(READERS_MAX)))
    many.add("r0", 0)
    with pytest.raises(ReaderInvalidError, match="at most 32"):
        many.add("one-more", 0)


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
            some.add(name, acked)
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
