"""Raw pairs against a dict with ends of life, at every moment."""

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from storage.mvcc import raw
from storage.mvcc.engine import Engine
from storage.mvcc.raw import RawPair, Swapped
from tests.memory_kv import MemoryKV

KEYS = st.sampled_from([b"a", b"b", b"bb", b"c"])
PREVIOUS = st.none() | st.sampled_from([b"", b"x"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.sampled_from([b"", b"x"]), st.integers(0, 9)),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("range"), KEYS, KEYS),
        st.tuples(st.just("swap"), KEYS, PREVIOUS, st.integers(0, 9), st.booleans()),
        st.tuples(st.just("sweep")),
        st.tuples(st.just("wait")),
    ),
    max_size=25,
)


def run(engine: Engine, command: Any) -> Any:
    return engine.apply([command]).results[0]


@given(STEPS)
def test_pairs_live_as_long_as_they_should(steps: list[Any]) -> None:
    engine, model, now_s = Engine(MemoryKV()), dict[bytes, tuple[bytes, int]](), 1
    for action, *given_ in steps:
        alive = {key: value for key, (value, end_s) in model.items() if not 0 < end_s <= now_s}
        match action, given_:
            case "put", [key, value, end_s]:
                run(engine, partial(raw.put, pairs=[RawPair(key, value, end_s)]))
                model[key] = (value, end_s)
            case "delete", [key]:
                run(engine, partial(raw.delete, keys=[key]))
                model.pop(key, None)
            case "range", [lower, upper]:
                run(engine, partial(raw.delete_range, lower=lower, upper=upper))
                model = {key: pair for key, pair in model.items() if not lower <= key < upper}
            case "swap", [key, previous, end_s, remove]:
                new = RawPair(key, b"new", end_s)
                swap = partial(
                    raw.compare_and_swap, new=new, previous=previous, now_s=now_s, remove=remove
                )
                found = alive.get(key)
                assert run(engine, swap) == Swapped(found == previous, found)
                if found == previous and remove:
                    model.pop(key, None)
                elif found == previous:
                    model[key] = (b"new", end_s)
            case "sweep", _:
                over = raw.expired(engine.kv, now_s, 100)
                assert over == sorted(set(model) - set(alive))
                run(engine, partial(raw.sweep, keys=[*over, b"a", b"b"], now_s=now_s))
                model = {key: model[key] for key in alive}
            case _:
                now_s += 1
        alive = {key: value for key, (value, end_s) in model.items() if not 0 < end_s <= now_s}
        for reverse in (False, True):
            scanned = raw.scan(engine.kv, b"", b"", now_s, 9, reverse=reverse)
            assert scanned == sorted(alive.items(), reverse=reverse)
        for key in (b"a", b"b", b"bb", b"c"):
            assert raw.get(engine.kv, key, now_s) == alive.get(key)
            assert key not in alive or raw.expires_s(engine.kv, key) == model[key][1]


def test_scans_stay_in_their_range_and_limit() -> None:
    engine = Engine(MemoryKV())
    run(
        engine,
        partial(
            raw.put,
            pairs=[RawPair(key, b"v", end_s) for key, end_s in ((b"a", 0), (b"b", 1), (b"c", 9))],
        ),
    )
    assert raw.scan(engine.kv, b"a", b"c", 5, 9) == [(b"a", b"v")]
    assert raw.scan(engine.kv, b"", b"", 0, 1) == [(b"a", b"v")]
    assert raw.scan(engine.kv, b"", b"", 5, 1, reverse=True) == [(b"c", b"v")]
