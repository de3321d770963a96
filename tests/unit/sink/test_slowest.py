"""The least of many timestamps equals the minimum, and costs no look at all of them."""

from hypothesis import given
from hypothesis import strategies as st

from sink.tables import Slowest

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "move", "least"]), st.integers(0, 5), st.integers(0, 30)
    ),
    max_size=60,
)


@given(steps)
def test_the_least_is_the_minimum_of_what_is_there(history: list[tuple[str, int, int]]) -> None:
    slowest: Slowest[int] = Slowest()
    timestamps: dict[int, int] = {}
    for operation, key, ts in history:
        if operation == "add" and key not in timestamps:
            timestamps[key] = ts
            slowest.add(key, ts)
        elif operation == "remove":
            timestamps.pop(key, None)
            slowest.remove(key)
        elif operation == "move" and key in timestamps:
            timestamps[key] = max(timestamps[key], ts)
            slowest.move(key, ts)
        elif operation == "least":
            least = slowest.least()
            assert (least[0] if least else None) == min(timestamps.values(), default=None)
            assert least is None or timestamps[least[1]] == least[0]
        assert len(slowest) == len(timestamps)
        assert len(slowest._heap) <= 2 * max(len(timestamps), 1)
