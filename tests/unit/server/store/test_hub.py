"""Routing, resolved timestamps and congestion of the change feed, without sockets."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from kvproto import cdcpb_pb2 as cdcpb

from server.store.feed.hub import FeedHub
from server.store.feed.outbox import Failure, Outbox, Rows, Subscription
from server.store.region_table import RegionGate
from storage.mvcc.change_feed import OpenLocks
from storage.mvcc.engine import COMMIT, PREWRITE, ROLLBACK, Change
from storage.mvcc.record import DELETE, PUT
from storage.mvcc.region import Region, RegionMap
from storage.queue import ByteBudget

LEFT, RIGHT = Region(1, 11, b"", b"m"), Region(2, 12, b"m", b"")


def outbox_of(max_bytes: int, memory: ByteBudget | None = None) -> Outbox:
    return Outbox(max_bytes, memory or ByteBudget(1 << 30))


def wanted(
    region: Region, *, old_values: bool = True, lower: bytes = b"", upper: bytes = b""
) -> Subscription:
    low, high = region.clamp(lower, upper)
    return Subscription(
        region=region,
        request_id=7,
        checkpoint_ts=0,
        lower=low,
        upper=high,
        old_values=old_values,
        initialized=True,
    )


def hub_with(outbox: Outbox, *subscriptions: Subscription) -> FeedHub:
    hub = FeedHub(RegionGate(1, RegionMap([LEFT, RIGHT])), OpenLocks([b"", b"m"]))
    for subscription in subscriptions:
        hub.attach(subscription, outbox)
    return hub


async def sent(outbox: Outbox) -> list[cdcpb.ChangeDataEvent]:
    outbox.close()
    return [message async for message in outbox.messages()]


def change(
    event: int, key: bytes, start_ts: int, commit_ts: int = 0, value: bytes = b"", old: bytes = b""
) -> Change:
    return Change(event, key, key, PUT if value else DELETE, start_ts, commit_ts, value, old)


async def test_changes_go_to_their_region_in_order_with_values_only_where_they_belong() -> None:
    outbox = outbox_of(1 << 20)
    hub = hub_with(outbox, wanted(LEFT), wanted(RIGHT, old_values=False))
    hub.observe(
        [
            change(PREWRITE, b"a", 5, value=b"v", old=b"o"),
            change(PREWRITE, b"z", 5, value=b"w", old=b"o"),
        ]
    )
    hub.observe([change(COMMIT, b"a", 5, 6), change(ROLLBACK, b"z", 5)])
    events = [event for message in await sent(outbox) for event in message.events]
    rows = [
        (event.region_id, row.type, row.key, row.value, row.old_value, row.commit_ts)
        for event in events
        for row in event.entries.entries
    ]
    assert [row for row in rows if row[0] == 1] == [
        (1, 1, b"a", b"v", b"o", 0),
        (1, 2, b"a", b"", b"", 6),
    ]
    assert [row for row in rows if row[0] == 2] == [
        (2, 1, b"z", b"w", b"", 0),
        (2, 3, b"z", b"", b"", 0),
    ]
    assert {event.request_id for event in events} == {7}


async def test_keys_outside_the_asked_range_are_not_sent() -> None:
    outbox = outbox_of(1 << 20)
    hub = hub_with(outbox, wanted(LEFT, lower=b"b", upper=b"d"))
    hub.observe([change(PREWRITE, key, 5, value=b"v") for key in (b"a", b"b", b"c", b"d")])
    (message,) = await sent(outbox)
    assert [row.key for row in message.events[0].entries.entries] == [b"b", b"c"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["prewrite", "commit", "rollback", "tick"]), st.integers(0, 3))
    )
)
async def test_no_commit_ever_comes_at_or_before_a_sent_resolved_ts(
    steps: Sequence[tuple[str, int]],
) -> None:
    outbox = outbox_of(1 << 30)
    subscriptions = [wanted(LEFT), wanted(RIGHT)]
    hub = hub_with(outbox, *subscriptions)
    keys = [b"a", b"b", b"y", b"z"]
    clock, open_txns = 100, dict[int, int]()
    for action, at in steps:
        clock += 1
        if action == "tick":
            hub.resolve(clock)
        elif action == "prewrite" and at not in open_txns:
            open_txns[at] = clock - 50  # started long before: resolved_ts may be past it already
            hub.observe([change(PREWRITE, keys[at], clock - 50, value=b"v")])
        elif action != "prewrite" and at in open_txns:
            event = COMMIT if action == "commit" else ROLLBACK
            hub.observe(
                [change(event, keys[at], open_txns.pop(at), clock if event == COMMIT else 0)]
            )
    resolved: dict[int, int] = {}
    for message in await sent(outbox):
        for region_id in message.resolved_ts.regions:
            assert message.resolved_ts.ts >= resolved.get(region_id, 0)
            resolved[region_id] = message.resolved_ts.ts
        for event in message.events:
            for row in event.entries.entries:
                assert row.type != cdcpb.Event.COMMIT or row.commit_ts > resolved.get(
                    event.region_id, 0
                )


async def test_open_locks_hold_back_only_their_region_and_only_initialized_ones_resolve() -> None:
    outbox = outbox_of(1 << 20)
    late = wanted(RIGHT)
    late.initialized = False
    hub = hub_with(outbox, wanted(LEFT), late)
    hub.observe([change(PREWRITE, b"a", 5, value=b"v")])
    hub.resolve(50)
    hub.observe([change(COMMIT, b"zzz", 5, 6)])
    late.initialized = True
    hub.resolve(60)
    ticks = [
        message.resolved_ts for message in await sent(outbox) if message.HasField("resolved_ts")
    ]
    assert [(list(tick.regions), tick.ts) for tick in ticks] == [([1], 4), ([1], 4), ([2], 60)]


async def test_a_slow_reader_is_cut_as_congested_and_memory_stays_bounded() -> None:
    outbox = outbox_of(1000)
    subscription = wanted(LEFT)
    hub = hub_with(outbox, subscription)
    for number in range(100):
        hub.observe([change(PREWRITE, b"a%d" % number, 5, value=b"v" * 100)])
    assert subscription.ended
    messages = await sent(outbox)
    events = [event for message in messages for event in message.events]
    assert events[-1].error.congested.region_id == 1
    assert sum(len(event.entries.entries) for event in events) < 10


async def test_a_split_ends_the_subscription_with_the_new_map() -> None:
    outbox = outbox_of(1000)
    gate = RegionGate(1, RegionMap([LEFT, RIGHT]))
    hub = FeedHub(gate, OpenLocks([b"", b"m"]))
    hub.attach(wanted(LEFT), outbox)
    parts = LEFT.split([b"f"], [(3, 13)])
    gate.regions = gate.regions.replaced([LEFT], parts)
    hub.replaced([LEFT], parts)
    hub.observe([change(PREWRITE, b"a", 5, value=b"v")])
    (message,) = await sent(outbox)
    (event,) = message.events
    assert {region.id for region in event.error.epoch_not_match.current_regions} == {1, 3}


async def test_resolved_ticks_of_an_idle_feed_do_not_pile_up() -> None:
    outbox = outbox_of(1000)
    hub = hub_with(outbox, wanted(LEFT))
    for ts in range(10, 1000):
        hub.resolve(ts)
    (message,) = await sent(outbox)
    assert message.resolved_ts.ts == 999


async def test_a_scan_waits_for_room() -> None:
    outbox = outbox_of(1000)
    subscription = wanted(LEFT)
    rows = Rows(subscription, [change(PREWRITE, b"a", 5, value=b"v")], 400)
    await outbox.put(rows)
    waiting = outbox.put(rows)
    assert waiting.send(None) is not None  # suspended
    waiting.close()


async def test_connections_share_one_memory_limit_and_an_idle_one_still_gets_through() -> None:
    memory = ByteBudget(1000)
    stuck, idle = outbox_of(10_000, memory), outbox_of(10_000, memory)
    rows = Rows(wanted(LEFT), [change(PREWRITE, b"a", 5, value=b"v")], 400)
    assert [stuck.offer(rows) for _ in range(4)] == [True, True, False, False]
    assert idle.offer(rows), "an empty outbox takes one piece whatever the others hold"
    assert not idle.offer(rows)
    stuck.drop()
    assert memory.used_bytes == 400
    assert idle.offer(rows)
    await sent(idle)
    assert memory.used_bytes == 0


async def test_requests_wait_while_their_refusals_fill_the_outbox() -> None:
    outbox = outbox_of(100)
    for request_id in range(5):
        outbox.control(Failure(1, request_id, cdcpb.Error()))
    waiting = outbox.wait_room()
    assert waiting.send(None) is not None  # suspended
    waiting.close()
    outbox.drop()
    await outbox.wait_room()


async def test_only_a_multiplexed_stream_names_requests_in_resolved_timestamps() -> None:
    outbox = Outbox(1 << 20, ByteBudget(1 << 20), multiplexed=False)
    hub = hub_with(outbox, wanted(LEFT), wanted(RIGHT))
    hub.resolve(50)
    (message,) = await sent(outbox)
    assert (
        message.resolved_ts.request_id,
        sorted(message.resolved_ts.regions),
        message.resolved_ts.ts,
    ) == (
        0,
        [1, 2],
        50,
    )


async def test_a_merge_ends_both_subscriptions_with_the_merged_region() -> None:
    outbox = outbox_of(1000)
    gate = RegionGate(1, RegionMap([LEFT, RIGHT]))
    hub = FeedHub(gate, OpenLocks([b"", b"m"]))
    hub.attach(wanted(LEFT), outbox)
    hub.attach(wanted(RIGHT), outbox)
    merged = RIGHT.merged(LEFT)
    gate.regions = gate.regions.replaced([LEFT, RIGHT], [merged])
    hub.replaced([LEFT, RIGHT], [merged])
    hub.resolve(9)
    (message,) = await sent(outbox)
    told = [
        (event.region_id, [r.id for r in event.error.epoch_not_match.current_regions])
        for event in message.events
    ]
    assert told == [(1, [2]), (2, [2])]
    assert hub.safe_ts(b"", b"") == 9


async def test_safe_ts_never_goes_back_over_late_locks_and_new_regions() -> None:
    gate = RegionGate(1, RegionMap([LEFT, RIGHT]))
    hub = FeedHub(gate, OpenLocks([b"", b"m"]))
    assert hub.safe_ts(b"", b"") == 0
    hub.resolve(50)
    hub.observe([change(PREWRITE, b"a", 5, value=b"v")])
    hub.resolve(60)
    assert (hub.safe_ts(b"", b""), hub.safe_ts(b"x", b"")) == (50, 60)
    parts = RIGHT.split([b"t"], [(3, 13)])
    gate.regions = gate.regions.replaced([RIGHT], parts)
    hub.replaced([RIGHT], parts)
    assert hub.safe_ts(b"x", b"") == 50
    hub.resolve(70)
    assert hub.safe_ts(b"x", b"") == 70
