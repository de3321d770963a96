"""Each target of the guided fuzzer takes its seeds, their beginnings, and what once failed."""

import pytest

from tests.fuzz.guided import CASES, TARGETS, attempt


@pytest.mark.parametrize("name", TARGETS)
def test_what_once_failed_is_read_or_refused(name: str) -> None:
    for case in sorted(CASES.glob(f"{name}/*")):
        attempt(name, case.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_beginnings_are_read_or_refused(name: str) -> None:
    for seed in TARGETS[name].seeds():
        attempt(name, seed)
        attempt(name, seed[: len(seed) // 2])
    attempt(name, b"")
