"""A transaction's reads see what it has written, over what the store has."""

from hypothesis import given
from hypothesis import strategies as st
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.transaction import WriteBuffer

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
PAIRS = st.dictionaries(KEYS, st.binary(max_size=2))
WRITES = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=2)))


@given(PAIRS, WRITES, KEYS, KEYS | st.just(b""))
def test_reads_are_those_of_a_dict_that_was_written_to(
    stored: dict[bytes, bytes], writes: list[tuple[bytes, bytes | None]], start: bytes, end: bytes
) -> None:
    buffer, oracle = WriteBuffer(), dict(stored)
    for key, value in writes:
        op = kvrpcpb.Del if value is None else kvrpcpb.Put
        buffer.add(kvrpcpb.Mutation(op=op, key=key, value=value or b""))
        oracle.pop(key, None)
        if value is not None:
            oracle[key] = value
    assert buffer.keys == {key for key, _ in writes}
    assert bool(buffer) == bool(writes)
    within = {key for key in oracle.keys() | buffer.keys if start <= key and (not end or key < end)}
    found = {key: value for key, value in stored.items() if key in within}
    assert buffer.over(found, buffer.between(start, end)) == {
        key: oracle[key] for key in within & oracle.keys()
    }


def test_a_lock_takes_no_write_away_and_is_no_value() -> None:
    buffer = WriteBuffer()
    buffer.add(kvrpcpb.Mutation(op=kvrpcpb.Insert, key=b"a", value=b"1"))
    buffer.lock([b"a", b"b"])
    assert [(mutation.key, mutation.op) for mutation in buffer.mutations] == [
        (b"a", kvrpcpb.Insert),
        (b"b", kvrpcpb.Lock),
    ]
    assert (buffer.value(b"a"), buffer.value(b"b")) == (b"1", None)
    assert b"b" in buffer
