"""Which capture gets which log."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.capture.owner import assign_logs

LOGS = st.sets(st.sampled_from([f"log{number}" for number in range(12)]))
CAPTURES = st.sets(st.sampled_from("abcde"))
NOW = st.dictionaries(
    st.sampled_from([f"log{number}" for number in range(12)]), st.sampled_from("abcdef")
)


@given(LOGS, NOW, CAPTURES)
def test_a_log_stays_while_its_capture_is_there_and_every_other_one_gets_one(logs, now, captures):
    placed = assign_logs(logs, now, captures, balanced=False)
    if not captures:
        assert placed == {log: capture for log, capture in now.items() if log in logs}
        return
    assert placed.keys() == logs
    assert set(placed.values()) <= captures
    for log in logs:
        if now.get(log) in captures:
            assert placed[log] == now[log]
    # Those that come go where the fewest are: no capture that got one has two more than another.
    counts = Counter(placed.values())
    given_to = {placed[log] for log in logs if now.get(log) not in captures}
    for capture in given_to:
        assert counts[capture] <= min(counts[each] for each in captures) + 1


@given(LOGS, NOW, CAPTURES.filter(bool))
def test_balanced_counts_differ_by_one_at_most_and_no_more_logs_move_than_must(logs, now, captures):
    placed = assign_logs(logs, now, captures, balanced=True)
    counts = Counter(dict.fromkeys(captures, 0))
    counts.update(placed.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    unbalanced = Counter(assign_logs(logs, now, captures, balanced=False).values())
    most = -(-len(logs) // len(captures))
    moved = sum(1 for log in logs if now.get(log) in captures and placed[log] != now[log])
    # At the least what is above the even share has to go, and no log goes back and forth.
    assert moved <= sum(max(0, count - most + 1) for count in unbalanced.values())
    assert assign_logs(logs, placed, captures, balanced=True) == placed
