from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from storage.pump.matcher import Matcher


@dataclass
class Oracle:
    """Keeps everything and looks at all of it: slow, and plainly right."""

    log: list[tuple[str, int, int]] = field(default_factory=list)

    def settled(self, start_ts: int) -> bool:
        return any(kind != "P" and start == start_ts for kind, start, _ in self.log)

    @property
    def waiting(self) -> list[tuple[int, int]]:
        return [
            (start_ts, position)
            for position, (kind, start_ts, _) in enumerate(self.log)
            if kind == "P" and not self.settled(start_ts)
        ]

    @property
    def max_commit_ts(self) -> int:
        commits = [0]
        for position, (kind, start_ts, commit_ts) in enumerate(self.log):
            first = all(known[:2] != ("P", start_ts) for known in self.log[:position])
            if kind == "P" and first and not self.settled(start_ts):
                break
            commits.append(commit_ts)
        return max(commits)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """As TiDB makes them: a commit_ts is taken after its prewrite is in the log;
    outcomes arrive in any order.
    """
    log: list[tuple[str, int, int]] = []
    running: list[int] = []
    arriving: list[tuple[str, int, int]] = []
    steps = draw(
        st.lists(st.sampled_from(["prewrite", "prewrite", "commit", "rollback", "arrive", "fake"]))
    )
    for clock, step in enumerate(steps, start=1):
        if step == "prewrite":
            running.append(clock)
            log.append(("P", clock, 0))
        elif step in ("commit", "rollback") and running:
            start_ts = running.pop(draw(st.integers(0, len(running) - 1)))
            arriving.append(("C", start_ts, clock) if step == "commit" else ("R", start_ts, 0))
        elif step == "arrive" and arriving:
            log.append(arriving.pop(draw(st.integers(0, len(arriving) - 1))))
        elif step == "fake":
            log.append(("F", clock, clock))
    return log


def feed(matcher: Matcher[int], position: int, event: tuple[str, int, int]) -> None:
    kind, start_ts, commit_ts = event
    if kind == "P":
        matcher.prewrite(start_ts, position)
    elif kind == "F":
        matcher.advance(commit_ts)
    else:
        matcher.settle(start_ts, commit_ts)


@given(histories())
def test_max_commit_ts_is_what_the_whole_log_says_after_every_step(
    log: list[tuple[str, int, int]],
) -> None:
    matcher: Matcher[int] = Matcher()
    oracle = Oracle()
    for position, event in enumerate(log):
        feed(matcher, position, event)
        oracle.log.append(event)
        assert matcher.max_commit_ts == oracle.max_commit_ts
        assert matcher.oldest_waiting(3) == oracle.waiting[:3]
        assert matcher.waits(event[1]) == (event[1] in dict(oracle.waiting))


@given(histories())
def test_max_commit_ts_never_goes_back_and_nothing_commits_below_it_later(
    log: list[tuple[str, int, int]],
) -> None:
    matcher: Matcher[int] = Matcher()
    for position, event in enumerate(log):
        before = matcher.max_commit_ts
        if event[0] == "C":
            assert event[2] > before
        feed(matcher, position, event)
        assert matcher.max_commit_ts >= before


@given(histories(), st.integers(0, 100))
def test_a_restart_from_the_oldest_wait_ends_in_the_same_state(
    log: list[tuple[str, int, int]], crash: int
) -> None:
    matcher: Matcher[int] = Matcher()
    crash = min(crash, len(log))
    for position, event in enumerate(log[:crash]):
        feed(matcher, position, event)
    oldest = matcher.oldest
    restarted: Matcher[int] = Matcher(matcher.max_commit_ts)
    for position in range(crash if oldest is None else oldest[1].position, len(log)):
        feed(restarted, position, log[position])
    for position in range(crash, len(log)):
        feed(matcher, position, log[position])
    assert (restarted.max_commit_ts, restarted.waiting, restarted.oldest) == (
        matcher.max_commit_ts,
        matcher.waiting,
        matcher.oldest,
    )


@given(
    st.permutations([("P", 1, 0), ("C", 1, 9), ("P", 2, 0), ("R", 2, 0), ("P", 3, 0), ("C", 3, 8)])
)
def test_outcomes_match_by_start_ts_in_any_order(log: list[tuple[str, int, int]]) -> None:
    matcher: Matcher[int] = Matcher()
    for position, event in enumerate(log):
        feed(matcher, position, event)
    assert (matcher.waiting, matcher.max_commit_ts) == (0, 9)


def test_a_repeated_prewrite_keeps_its_place() -> None:
    matcher: Matcher[int] = Matcher()
    assert matcher.prewrite(1, 0) is None
    matcher.settle(99, 5)
    assert matcher.prewrite(1, 7) is None
    waited = matcher.settle(1, 6)
    assert waited is not None
    assert (waited.position, waited.max_commit_ts) == (0, 0)
    assert matcher.prewrite(1, 8) == 6


def test_outcomes_are_remembered_up_to_the_limit() -> None:
    matcher: Matcher[int] = Matcher(settled=2)
    for start_ts in (1, 2, 3):
        matcher.settle(start_ts, 0)
    assert (matcher.prewrite(2, 0), matcher.prewrite(3, 1), matcher.prewrite(1, 2)) == (0, 0, None)
