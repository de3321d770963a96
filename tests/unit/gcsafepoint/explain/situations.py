"""Situations: the moment every test looks at, and random ones."""

from hypothesis import strategies as st

from gcsafepoint.explain.names import creating_service, feed_service
from gcsafepoint.explain.situation import Capture, Feed, Lock, Region, Situation, Table, Worker
from gcsafepoint.state.rules import GC_WORKER, NEVER_S, ServiceSafePoint
from gcsafepoint.state.states import GcView, MinStartTs
from storage.model.ts import compose

NOW_S = 1_795_000_000
HOUR_S = 3600


def ago(seconds: float) -> int:
    """The timestamp of so many seconds before now."""
    return compose(int((NOW_S - seconds) * 1000))


def view(
    services=(), worker_ts=None, global_barriers=(), min_start_ts=(), gc_safe_point=0
) -> GcView:
    worker = ServiceSafePoint(GC_WORKER, NEVER_S, ago(600) if worker_ts is None else worker_ts)
    services = tuple(sorted(services, key=lambda service: service.safe_point))
    least = min((worker, *services, *global_barriers), key=lambda service: service.safe_point)
    return GcView(
        now_s=NOW_S,
        gc_safe_point=gc_safe_point,
        txn_safe_point=gc_safe_point,
        minimum=least,
        gc_worker=worker,
        services=services,
        global_barriers=tuple(global_barriers),
        min_start_ts=tuple(min_start_ts),
    )


def service(name: str, age_s: float, ttl_s: int = 86_400) -> ServiceSafePoint:
    """One that was renewed so that `ttl_s` are left."""
    return ServiceSafePoint(name, NOW_S + ttl_s, ago(age_s))


LEADER = Worker(leader="host:a, pid:1", last_run="20261121-10:00:00 +0000")
OWNER = Capture("c1", "127.0.0.1:8300", is_owner=True)

_ids = st.sampled_from(["a", "b", "bank", "x-1"])
_names = st.one_of(
    _ids.map(feed_service),
    _ids.map(creating_service),
    st.sampled_from(["br-7", "native_br", "lightning-3", "odd\x1b[31m", "bad\udcff", "ä"]),
    st.text(min_size=1, max_size=6).filter(lambda name: name != GC_WORKER),
)
_ts = st.one_of(st.integers(0, (1 << 64) - 1), st.integers(0, 200_000).map(ago))
_expiry = st.one_of(st.just(NEVER_S), st.integers(NOW_S - 50, NOW_S + 50))
_barriers = st.lists(st.tuples(_names, _expiry, _ts), unique_by=lambda one: one[0], max_size=6).map(
    lambda found: [ServiceSafePoint(*one) for one in found]
)
_locks = st.lists(
    st.builds(
        Lock, start_ts=_ts, primary=st.just("6b"), key=st.just("6b"), ttl_ms=st.integers(0, 1 << 40)
    ),
    max_size=3,
).map(tuple)
_regions = st.lists(
    st.builds(
        Region, st.integers(0, 9), _ts, st.just("s:1"), _locks, st.sampled_from(["", "no\n"])
    ),
    max_size=3,
).map(tuple)
_tables = st.lists(st.builds(Table, st.just("bank.t"), _ts, _ts, _regions), max_size=3).map(tuple)
_feeds = st.lists(
    st.builds(
        Feed,
        id=_ids,
        state=st.sampled_from(["normal", "warning", "stopped", "failed"]),
        checkpoint_ts=_ts,
        error_code=st.sampled_from(["", "ErrX", "ErrSnapshotLostByGC"]),
        error=st.text(max_size=5),
        capture=st.sampled_from(["", "c1 at host:1"]),
        tables=_tables,
    ),
    unique_by=lambda feed: feed.id,
    max_size=4,
).map(lambda feeds: {feed.id: feed for feed in feeds})
_captures = st.lists(
    st.builds(
        Capture, st.just("c"), st.just("h:1"), st.booleans(), st.sampled_from(["", "no answer"])
    ),
    max_size=2,
).map(tuple)


@st.composite
def situations(draw) -> Situation:
    """Anything that can be gathered."""
    running = draw(
        st.lists(
            st.builds(MinStartTs, st.text(max_size=4), _ts),
            unique_by=lambda one: one.owner,
            max_size=2,
        )
    )
    return Situation(
        view(draw(_barriers), draw(_ts), draw(_barriers), running, draw(_ts)),
        draw(_feeds),
        draw(_captures),
        draw(st.sampled_from([LEADER, Worker(), Worker(enabled=False), Worker(problem="no\x00")])),
        ("a capture did not answer",),
    )
