"""The checkpoint: acknowledgements in any order never let it pass an unacknowledged row."""

from hypothesis import given
from hypothesis import strategies as st

from sink.progress import Checkpoint

ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))),
    max_size=25,
)


@given(ranges, st.integers(0, 10))
def test_the_checkpoint_is_the_end_of_the_gapless_beginning(
    acks: list[tuple[int, int]], start_ts: int
) -> None:
    checkpoint, acknowledged, last = Checkpoint(start_ts), set(range(start_ts + 1)), start_ts
    for start, end in acks:
        before = checkpoint.checkpoint_ts
        acknowledged |= set(range(start + 1, end + 1))
        reached = checkpoint.ack(start, end)
        assert set(range(reached + 1)) <= acknowledged
        assert reached + 1 not in acknowledged
        assert reached >= last
        assert checkpoint.previous_ts == (before if reached > before else checkpoint.previous_ts)
        assert checkpoint.previous_ts <= reached
        last = reached


def test_acknowledging_again_keeps_the_range_that_can_be_replayed() -> None:
    checkpoint = Checkpoint(10)
    checkpoint.ack(10, 20)
    checkpoint.ack(20, 30)
    checkpoint.ack(20, 30)
    checkpoint.ack(0, 5)
    assert (checkpoint.previous_ts, checkpoint.checkpoint_ts) == (20, 30)
