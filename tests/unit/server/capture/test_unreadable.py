"""A changefeed whose records cannot be read: it stops, its history stays, and the others run."""

import json

import pytest

from server.capture import checkpoint_saver
from server.capture.errors import ChangefeedExistsError, ChangefeedUnreadableError
from server.capture.service import changefeed_message
from server.capture.update import ChangefeedUpdate
from server.changefeed import keys
from server.changefeed.info import State
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.test_owner import until

URI = "delta:///lake"
SERVICE = "ticdc-default-broken"
CREATING = "ticdc-default-creating_broken"


def later(value):
    return json.dumps(json.loads(value) | {"of a later version": 1}).encode()


def of_no_type(value):
    return json.dumps(json.loads(value) | {"start_ts": "soon"}).encode()


def of_another(value):
    return json.dumps(json.loads(value) | {"id": "well"}).encode()


RECORDS = [
    pytest.param(keys.info, later, id="later version"),
    pytest.param(keys.info, of_no_type, id="text for a number"),
    pytest.param(keys.info, of_another, id="another changefeed's"),
    pytest.param(keys.info, lambda _: b"[" * 100_000, id="deep"),
    pytest.param(keys.info, lambda _: b"\xff", id="garbage"),
    pytest.param(keys.status, lambda _: b"{}", id="status"),
]


async def broken(capture, meta, key, damage):
    """Two changefeeds, one of which the next owner cannot read."""
    owner = await capture.start()
    for name in ("broken", "well"):
        feed = await owner.create(new(name, f"{URI}/{name}", 1000, 0, [capture.table]))
        await until(lambda feed=feed: feed.safepoint_time)
    await capture.stop()
    pair = await meta.get(key("broken"))
    damaged = damage(pair.value)
    await meta.put(pair.key, damaged)
    return damaged


@pytest.mark.parametrize(("key", "damage"), RECORDS)
async def test_it_is_listed_as_failed_and_the_others_run(capture, meta, upstream, key, damage):
    damaged = await broken(capture, meta, key, damage)
    owner = await capture.start()
    feed = owner.feed("broken")
    assert feed.info.state is State.FAILED
    assert feed.info.error.code == "ErrCorrupt"
    assert "'broken'" in feed.info.error.message
    assert "A later version may have written it" in feed.info.error.message
    assert changefeed_message(feed).id == "broken"
    await until(lambda: upstream.subscriptions)
    upstream.resolve(1030)
    await until(lambda: owner.feed("well").processor.resolved_ts == 1030)
    with pytest.raises(ChangefeedExistsError):
        await owner.create(new("broken", URI, 1000, 0, [capture.table]))
    for change in (
        owner.pause("broken"),
        owner.resume("broken"),
        owner.update("broken", ChangefeedUpdate(sink_uri=URI)),
        owner.add_reader("broken", "reader"),
        owner.remove_reader("broken", "reader"),
    ):
        with pytest.raises(ChangefeedUnreadableError, match="later version"):
            await change
    await capture.stop()
    assert (await meta.get(key("broken"))).value == damaged


async def test_its_service_safepoint_is_renewed_as_it_is(capture, meta, upstream, monkeypatch):
    await broken(capture, meta, keys.info, later)
    upstream.safepoints["gc_worker"] = 500
    await upstream.update_service_gc_safe_point(SERVICE, 10, 700)
    renewed = []
    update = upstream.update_service_gc_safe_point

    async def noted(service_id, ttl_s, safe_point):
        renewed.append((service_id, ttl_s, safe_point))
        return await update(service_id, ttl_s, safe_point)

    monkeypatch.setattr(upstream, "update_service_gc_safe_point", noted)
    owner = await capture.start()
    await until(lambda: owner.feed("broken").safepoint_time)
    assert (SERVICE, 86_400, 700) in renewed


async def test_where_none_is_held_none_is_set(capture, meta, upstream):
    await broken(capture, meta, keys.info, later)
    await upstream.update_service_gc_safe_point(SERVICE, 0, 0)
    owner = await capture.start()
    await until(lambda: owner.feed("broken").safepoint_time)
    assert SERVICE not in upstream.safepoints


async def test_a_creation_that_only_its_safepoint_tells_of_is_held_by_its_own(
    capture, meta, upstream, monkeypatch
):
    await broken(capture, meta, keys.info, later)
    await upstream.update_service_gc_safe_point(CREATING, 60, 999)
    await upstream.update_service_gc_safe_point(SERVICE, 0, 0)
    monkeypatch.setattr(checkpoint_saver, "_SWEEP_EVERY_S", 0.0)
    await capture.start()
    await until(lambda: CREATING not in upstream.safepoints)
    assert upstream.safepoints[SERVICE] == 999


async def test_history_that_gc_has_passed_is_told(capture, meta, upstream):
    await broken(capture, meta, keys.info, later)
    upstream.safepoints = {"gc_worker": 5000}
    owner = await capture.start()
    feed = owner.feed("broken")
    await until(lambda: feed.info.error.code == "ErrSnapshotLostByGC")
    assert feed.info.state is State.FAILED


async def test_a_removal_frees_its_history_and_deletes_what_there_is(capture, meta, upstream):
    await broken(capture, meta, keys.info, later)
    owner = await capture.start()
    await owner.remove("broken")
    assert "broken" not in owner.feeds
    assert not {SERVICE, CREATING} & upstream.safepoints.keys()
    assert await meta.get(keys.info("broken")) is None
    assert await meta.get_prefix(keys.schemas("broken")) == []
    await capture.stop()
    assert set((await capture.start()).feeds) == {"well"}


async def test_a_version_that_can_read_it_goes_on_where_it_was(capture, meta, upstream):
    await broken(capture, meta, keys.info, later)
    owner = await capture.start()
    await until(lambda: owner.feed("broken").safepoint_time)
    await capture.stop()
    record = json.loads((await meta.get(keys.info("broken"))).value)
    del record["of a later version"]
    await meta.put(keys.info("broken"), json.dumps(record).encode())
    owner = await capture.start()
    feed = owner.feed("broken")
    assert (feed.info.state, feed.checkpoint_ts) == (State.NORMAL, 1000)
    await until(lambda: feed.processor.sink)


async def test_a_key_that_no_changefeed_can_have_is_left_alone(capture, meta):
    for name in (b"../../etc", b"\xff", b""):
        await meta.put(keys.INFOS + name, b"{}")
    owner = await capture.start()
    assert owner.feeds == {}
