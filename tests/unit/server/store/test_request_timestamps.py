"""Timestamps of the future are refused, and the oracle is asked only when it matters."""

import pytest
from kvproto import errorpb_pb2 as errorpb

from server.store.runner import MAX_ENTRY_BYTES, TimestampCheck, entry_fault, key_fault
from storage.model.errors import UnavailableError
from storage.model.ts import MAX_TS, compose

NOW = compose(1_000_000)
AHEAD = compose(1_060_000)


class Oracle:
    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    async def tso(self) -> int:
        if not self.answers:
            raise UnavailableError("no coordinator")
        return self.answers.pop(0)


async def test_timestamps_up_to_a_minute_ahead_need_nobody() -> None:
    check = TimestampCheck(Oracle().tso, NOW)
    for ts in (0, NOW, AHEAD, MAX_TS):
        await check.reach(ts)
        assert check.fault(ts) is None


async def test_a_later_one_is_taken_only_if_the_oracle_has_got_there() -> None:
    oracle = Oracle(NOW, AHEAD)
    check = TimestampCheck(oracle.tso, NOW)
    await check.reach(AHEAD + 1)
    assert check.fault(AHEAD + 1) is not None
    await check.reach(AHEAD + 1)
    assert check.fault(AHEAD + 1) is None
    await check.reach(AHEAD + 1)
    assert oracle.answers == []


async def test_without_a_coordinator_nothing_of_the_future_is_believed() -> None:
    check = TimestampCheck(Oracle().tso, NOW)
    with pytest.raises(UnavailableError):
        await check.reach(AHEAD + 1)


@pytest.mark.parametrize(
    ("keys", "raw", "code"),
    [
        ([], False, ""),
        ([b"k"], False, ""),
        ([b"k", b""], False, "ErrKeyEmpty"),
        ([b"", b"k"], True, "ErrKeyEmpty"),
        ([bytes(8192)], True, ""),
        ([bytes(8193)], True, "ErrKeyTooLarge"),
        ([bytes(7279)], False, ""),
        ([bytes(7280)], False, "ErrKeyTooLarge"),
        ([b"k", bytes(8193)], False, "ErrKeyTooLarge"),
    ],
)
def test_keys_have_a_byte_at_least_and_8_kib_encoded_at_most(
    keys: list[bytes], raw: bool, code: str
) -> None:
    fault = key_fault(keys, raw=raw)
    assert (fault.code if fault else "") == code


def test_a_write_has_8_mib_at_most() -> None:
    assert entry_fault(MAX_ENTRY_BYTES, 7) is None
    error = entry_fault(MAX_ENTRY_BYTES + 1, 7)
    assert isinstance(error, errorpb.Error)
    assert (error.raft_entry_too_large.region_id, error.raft_entry_too_large.entry_size) == (
        7,
        MAX_ENTRY_BYTES + 1,
    )
