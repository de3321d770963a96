"""The checker finds what must not be, and allows what only overlaps."""

from typing import Any

import pytest

from tests.integration.coordinator.history import GcSafePoint, Hold, Tso, faults_of


def tso(sent_s: float, received_s: float, first: int, last: int) -> Tso:
    return Tso(sent_s, received_s, "client", first, last)


def safe_point(sent_s: float, received_s: float, value: int) -> GcSafePoint:
    return GcSafePoint(sent_s, received_s, "client", value)


HOLD = Hold("ticdc-a", 50, since_s=1, until_s=5)


@pytest.mark.parametrize(
    ("tsos", "safe_points", "fault"),
    [
        ([tso(0, 1, 1, 10), tso(0, 1, 10, 20)], [], "handed out twice"),
        ([tso(0, 1, 11, 20), tso(2, 3, 1, 10)], [], "no greater timestamps"),
        ([tso(0, 1, 90, 99), tso(0, 3, 1, 10), tso(2, 4, 20, 30)], [], "no greater timestamps"),
        ([], [safe_point(0, 1, 9), safe_point(2, 3, 8)], "went back"),
        ([], [safe_point(2, 3, 51)], "passed a live service"),
    ],
)
def test_a_fault_is_found(tsos: Any, safe_points: Any, fault: str) -> None:
    (told,) = faults_of(tsos, safe_points, [HOLD])
    assert fault in told


@pytest.mark.parametrize(
    ("tsos", "safe_points"),
    [
        ([tso(0, 2, 11, 20), tso(1, 3, 1, 10)], []),  # under way at the same time
        ([tso(0, 1, 1, 10), tso(2, 3, 11, 20)], []),
        ([], [safe_point(0, 2, 9), safe_point(1, 3, 8), safe_point(4, 5, 9)]),
        (
            [],
            [safe_point(2, 3, 50), safe_point(0.5, 6, 60), safe_point(5.5, 6, 99)],
        ),  # not certainly while held
    ],
)
def test_what_one_coordinator_could_have_answered_is_no_fault(tsos: Any, safe_points: Any) -> None:
    assert not faults_of(tsos, safe_points, [HOLD])
