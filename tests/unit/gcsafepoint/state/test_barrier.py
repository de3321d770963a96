"""Barriers by id, by timestamp and by expiry: against one plain dict, and without garbage."""

from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.state.records import json_text, key_bytes, key_text, valid_text
from gcsafepoint.state.rules import NEVER_S, Barriers, ServiceSafePoint, quoted, time_text

BARRIERS = st.builds(
    ServiceSafePoint,
    st.sampled_from("abcdef"),
    st.integers(0, 20) | st.just(NEVER_S),
    st.integers(0, 20),
)


@given(st.lists(BARRIERS | st.sampled_from("abcdef") | st.integers(0, 21)))
def test_the_lowest_and_the_expired_are_those_of_a_dict(
    steps: list[ServiceSafePoint | str | int],
) -> None:
    barriers, plain = Barriers(), dict[str, ServiceSafePoint]()
    for step in steps:
        if isinstance(step, ServiceSafePoint):
            barriers.put(step)
            plain[step.service_id] = step
        elif isinstance(step, str):
            assert barriers.remove(step) == plain.pop(step, None)
        else:
            barriers.drop_expired(step)
            plain = {name: barrier for name, barrier in plain.items() if barrier.expired_at >= step}
        expected = min(
            plain.values(),
            key=lambda barrier: (barrier.safe_point, barrier.service_id),
            default=None,
        )
        assert barriers.lowest() == expected
        assert set(barriers) == set(plain.values())


def test_ten_thousand_renewals_leave_no_garbage() -> None:
    barriers = Barriers()
    for number in range(10_000):
        barriers.put(ServiceSafePoint(f"s{number % 10}", 1000 + number, number))
    assert len(barriers._by_safe_point) < 200
    assert len(barriers._by_expiry) < 200


def test_a_barrier_is_described_as_pd_does() -> None:
    described = ServiceSafePoint('é"\n', 1795264103, 70).describe()
    assert described == (
        r'GCBarrier { BarrierID: "\u00e9\"\n", BarrierTS: 70, ExpirationTime: "2026-11-21 12:28:23 +0000 UTC" }'
    )
    assert 'ExpirationTime: "<nil>"' in ServiceSafePoint("a", NEVER_S, 70).describe(
        "GlobalGCBarrier"
    )


def test_texts_are_gos() -> None:
    assert quoted("a\x00\x7f🙂" + key_text(b"\xff")) == r'"a\x00\x7f\U0001f642\xff"'
    assert time_text(0) == "1970-01-01 00:00:00 +0000 UTC"
    assert time_text(NEVER_S) == str(NEVER_S)
    assert json_text({"id": 'é<&>"\n'}) == b'{"id":"\xc3\xa9\\u003c\\u0026\\u003e\\"\\n"}'
    assert valid_text(key_text(b"a\xff")) == "a\ufffd"


@given(st.binary())
def test_any_key_is_a_text_and_back(raw: bytes) -> None:
    assert key_bytes(key_text(raw)) == raw
    valid_text(key_text(raw)).encode()
