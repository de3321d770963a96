"""What a cluster answered, and whether a single correct coordinator could have answered it.

Times are of one monotonic clock. An answer is true at some instant between its request's sending
and its receipt, so only answers that are certainly ordered are compared: one was received before
the other's request was sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Answer:
    """Between which instants it was answered, and by which route it was asked."""

    sent_s: float
    received_s: float
    asked: str


A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Tso(Answer):
    """The timestamps `first` to `last`."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class GcSafePoint(Answer):
    """What stores may collect up to."""

    safe_point: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A service keeps everything newer than `safe_point`: certainly since `since_s`,
    certainly until `until_s`.
    """

    service_id: str
    safe_point: int
    since_s: float
    until_s: float


def faults_of(
    tsos: Sequence[Tso], safe_points: Sequence[GcSafePoint], holds: Sequence[Hold]
) -> list[str]:
    """Every way in which the answers contradict one coordinator; empty when they do not."""
    return [
        *_repeated(tsos),
        *_not_above(tsos),
        *_gone_back(safe_points),
        *_passed(safe_points, holds),
    ]


def _repeated(tsos: Sequence[Tso]) -> Iterator[str]:
    for one, other in pairwise(sorted(tsos, key=lambda tso: tso.first)):
        if other.first <= one.last:
            yield f"timestamps were handed out twice: {one} and {other}"


def _not_above(tsos: Sequence[Tso]) -> Iterator[str]:
    for earlier, later in _ordered(tsos, lambda tso: tso.last):
        if later.first <= earlier.last:
            yield f"a later request got no greater timestamps: {earlier}, then {later}"


def _gone_back(safe_points: Sequence[GcSafePoint]) -> Iterator[str]:
    for earlier, later in _ordered(safe_points, lambda answer: answer.safe_point):
        if later.safe_point < earlier.safe_point:
            yield f"the GC safe point went back: {earlier}, then {later}"


def _passed(safe_points: Sequence[GcSafePoint], holds: Sequence[Hold]) -> Iterator[str]:
    for answer in safe_points:
        for hold in holds:
            if (
                hold.since_s < answer.sent_s
                and answer.received_s < hold.until_s
                and answer.safe_point > hold.safe_point
            ):
                yield f"the GC safe point passed a live service: {answer}, while {hold}"


def _ordered(answers: Sequence[A], size: Callable[[A], int]) -> Iterator[tuple[A, A]]:
    """Each answer with the greatest of all that were received before it was asked for."""
    received = sorted(answers, key=lambda answer: answer.received_s)
    at, greatest = 0, None
    for answer in sorted(answers, key=lambda answer: answer.sent_s):
        while at < len(received) and received[at].received_s < answer.sent_s:
            if greatest is None or size(received[at]) > size(greatest):
                greatest = received[at]
            at += 1
        if greatest is not None:
            yield greatest, answer
