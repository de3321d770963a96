"""The history: every round reads back the same, a hundred are kept,
and nothing that is unreadable breaks a round.
"""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.records import (
    ROUNDS,
    ROUNDS_KEPT,
    load_rounds,
    round_from_json,
    round_key,
    round_to_json,
    tidy_rounds,
)
from gcsafepoint.worker.round import Phase, Result, Round

counts = st.integers(0, 2**63)
rounds = st.builds(
    Round,
    id=st.integers(1, 2**64 - 1),
    worker=st.text(max_size=8),
    phase=st.sampled_from(Phase),
    started_ms=counts,
    ended_ms=counts,
    phase_started_ms=counts,
    phase_ms=st.dictionaries(st.sampled_from([phase.label for phase in Phase]), counts),
    safe_point=counts,
    blocker=st.text(max_size=8),
    total=counts,
    done=counts,
    resolved_locks=counts,
    result=st.sampled_from(Result),
    error=st.text(max_size=8),
)


@given(rounds)
def test_a_round_reads_back_the_same(it: Round) -> None:
    assert round_from_json(round_key(it), round_to_json(it)) == it


@given(st.text(max_size=20))
def test_anything_else_is_a_failed_round_that_says_so(text: str) -> None:
    it = round_from_json(f"{ROUNDS}00000000000000000007", text)
    assert (it.id, it.phase, it.result) == (7, Phase.ENDED, Result.FAILED)
    assert "cannot be read" in it.error
    assert round_from_json(f"{ROUNDS}odd", text).id == 0


@given(st.lists(st.sampled_from(["running", "mine", "ended", "garbage"]), max_size=300))
def test_a_hundred_are_kept_with_the_one_that_begins_and_the_unfinished_of_others_are_named(
    memory_records: Any, kinds: list[str]
) -> None:
    async def run() -> None:
        records = memory_records()
        for number, kind in enumerate(kinds, 1):
            it = Round(
                id=number,
                worker="it",
                phase=Phase.ENDED if kind == "ended" else Phase.RESOLVE_LOCKS,
            )
            await records.write(
                {round_key(it): kind if kind == "garbage" else round_to_json(it)}, {}
            )
        mine = [number for number, kind in enumerate(kinds, 1) if kind == "mine"]
        for _ in range(4):  # a transaction takes no more than a hundred changes
            await tidy_rounds(records, mine, 99, {})
        kept = await load_rounds(records)
        assert [it.id for it in kept] == list(range(len(kinds), 0, -1))[: ROUNDS_KEPT - 1]
        for it in kept:
            kind = kinds[it.id - 1]
            assert it.phase is (Phase.RESOLVE_LOCKS if kind == "mine" else Phase.ENDED)
            if kind == "running":
                assert (it.result, it.ended_ms) == (Result.ABANDONED, 99)
                assert "its worker it was gone in the phase resolve locks" in it.error

    asyncio.run(run())


async def test_a_leader_that_was_succeeded_tidies_nothing(records: Any) -> None:
    it = Round(id=1, phase=Phase.PREPARE)
    await records.write({round_key(it): round_to_json(it)}, {})
    await tidy_rounds(records, [], 99, {"leader": 7})
    assert await load_rounds(records) == [it]
