"""What an audit finds is seen at its changefeed until it is mended;
an audit that cannot be is refused by name.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.audit import Audit, Finding, audit_silence, check_audit
from server.capture.errors import AuditUnsupportedError, ParameterError
from server.capture.flight import OwnerFeeds
from server.capture.service import changefeed_message
from server.capture.update import ChangefeedUpdate
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo
from server.changefeed.view import detail, summary
from server.verify.verify import AuditRecords
from sink.flight.feeds import FAILED, Report
from storage.model.errors import CorruptError
from tests.unit.server.capture.conftest import new

ENDS = st.none() | st.integers(-(2**63), 2**64)
SPANS = st.lists(st.tuples(ENDS, ENDS), max_size=5).map(tuple)
FOUND = Finding(
    table="bank.accounts",
    ts=1005,
    time="2026-11-23T06:00:00+00:00",
    column="id",
    spans=((None, 7),),
)


async def until(condition):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


@pytest.fixture
async def owner(capture, upstream):
    owner = await capture.start()
    await owner.create(new("feed", "delta:///lake", 1000, 0, [capture.table], audit_s=3600))
    await until(lambda: upstream.subscriptions)
    return owner


def shown(owner):
    """State and code as `changefeed list` shows them."""
    short = summary(changefeed_message(owner.feed("feed")), 0.0)["summary"]
    return short["state"], short["error"] and short["error"]["code"]


@given(
    st.builds(
        Finding,
        table=st.text(),
        ts=st.integers(0, 2**64),
        time=st.text(),
        mode=st.sampled_from(["upsert", "scd2"]),
        column=st.text(),
        spans=SPANS,
        ranges=st.integers(1, 9),
    )
)
def test_a_finding_comes_back_as_it_was_written(finding):
    assert Finding.from_json(finding.to_json()) == finding


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"spans":[[1]]}', b'{"spans":[],"what":1}'])
def test_a_damaged_finding_is_corrupt(value):
    with pytest.raises(CorruptError):
        Finding.from_json(value)


@given(SPANS, SPANS)
def test_ranges_of_several_turns_are_kept_together(one, other):
    one, other = tuple(dict.fromkeys(one)), tuple(dict.fromkeys(other))
    before = replace(FOUND, ts=1, spans=one, ranges=max(len(one), 1))
    both = replace(FOUND, spans=other, ranges=max(len(other), 1)).with_earlier_spans(before)
    assert both.ts == FOUND.ts
    assert set(both.spans) == {*one, *other}
    if one and other:
        assert both.ranges == len({*one, *other})
    assert FOUND.with_earlier_spans(replace(before, column="other")) == FOUND


async def test_a_difference_is_a_warning_with_the_command_that_mends_it_until_it_is_gone(
    capture, owner, meta
):
    assert shown(owner) == ("normal", None)
    assert detail(changefeed_message(owner.feed("feed")))["audit_seconds"] == 3600
    records = AuditRecords(meta, "feed")
    await records.save(FOUND)
    await until(lambda: shown(owner) == ("warning", "TM:ErrAuditDiffers"))
    told = detail(changefeed_message(owner.feed("feed")))["error"]["message"]
    assert (
        "bank.accounts (id below 7): `tidemark cli verify -c feed --table bank.accounts --repair` "
        "mends it" in told
    )
    owner.feed("feed").job = None
    await capture.stop()  # a new owner knows it, too
    owner = await capture.start()
    await until(lambda: shown(owner) == ("warning", "TM:ErrAuditDiffers"))
    await records.remove("bank.accounts", 1004)
    assert await records.findings() == {"bank.accounts": FOUND}, "an older cut says nothing"
    await records.remove("bank.accounts", 1005)
    await until(lambda: shown(owner) == ("normal", None))


async def test_a_finding_that_comes_meanwhile_is_neither_removed_nor_overwritten(
    owner, meta, monkeypatch
):
    records, read = AuditRecords(meta, "feed"), meta.get
    other = replace(FOUND, ts=2000, spans=((100, 200),))
    later = iter([other])

    async def read_late(key):
        pair = await read(key)
        for finding in later:
            await AuditRecords(meta, "feed").save(finding)
        return pair

    monkeypatch.setattr(meta, "get", read_late)
    await records.save(FOUND)
    kept = (await records.findings())["bank.accounts"]
    assert (kept.ts, {*kept.spans}) == (2000, {*FOUND.spans, *other.spans})
    later = iter([replace(other, ts=3000)])
    await records.remove("bank.accounts", 2500)
    assert (await records.findings())["bank.accounts"].ts == 3000


async def test_the_jobs_own_error_is_shown_first(owner, meta):
    await AuditRecords(meta, "feed").save(FOUND)
    await until(lambda: shown(owner) == ("warning", "TM:ErrAuditDiffers"))
    OwnerFeeds(owner).report("feed", Report(FAILED, 0, "ErrTargetRefused", "no"))
    assert shown(owner) == ("failed", "TM:ErrTargetRefused")


async def test_an_audit_that_is_turned_off_or_whose_changefeed_goes_leaves_nothing(
    capture, owner, meta
):
    records = AuditRecords(meta, "feed")
    await records.save(FOUND)
    await records.save_on_time("2026-11-23T06:00:00+00:00")
    await until(lambda: shown(owner)[0] == "warning")
    await owner.update("feed", ChangefeedUpdate(audit_s=0))
    assert shown(owner) == ("normal", None)
    assert await meta.get_prefix(keys.AUDITS) == []
    await owner.update("feed", ChangefeedUpdate(audit_s=600))
    await records.save(FOUND)
    await owner.remove("feed")
    assert await meta.get_prefix(keys.AUDITS) == []
    await records.save(FOUND)
    assert await meta.get_prefix(keys.AUDITS) == [], "a job that ends late writes nothing"


async def test_a_finding_that_cannot_be_read_hides_no_other(owner, meta):
    await meta.put(keys.audit_finding("feed", "bank.odd"), b"{}")
    await AuditRecords(meta, "feed2").save(FOUND)
    await meta.put(keys.audit_finding("feed", "bank.accounts"), FOUND.to_json())
    await until(lambda: shown(owner) == ("warning", "TM:ErrAuditDiffers"))


async def test_an_audit_of_what_cannot_be_compared_is_refused_by_name(owner, capture, upstream):
    async def none():
        return []

    upstream.stores = none
    for members, told in [
        ({"sink_uri": "parquet:///lake"}, "a sink parquet:// is a changelog"),
        ({"sink_uri": "parquet+hdfs://nn/lake"}, r"a sink parquet\+hdfs:// is a changelog"),
        ({"sink_uri": "delta:///lake?mode=append"}, "mode=append keeps all changes"),
        ({"sink_uri": "flight://"}, "a sink flight:// is kept by a reader of its own"),
        ({"source_uri": "pump://"}, "the cluster has no store"),
    ]:
        with pytest.raises(AuditUnsupportedError, match=told):
            await owner.create(new("other", tables=[capture.table], audit_s=60, **members))
    for seconds in (1, 59, 90 * 86_400 + 1):
        with pytest.raises(ParameterError, match="--audit is 1m to 2160h"):
            await owner.update("feed", ChangefeedUpdate(audit_s=seconds))
    assert list(owner.feeds) == ["feed"]
    check_audit(0, "parquet:///lake")


def test_only_an_audit_that_is_asked_for_is_in_the_record():
    info = ChangefeedInfo(
        id="feed", sink_uri="delta:///lake", start_ts=1, target_ts=0, create_time=""
    )
    assert b"audit" not in info.to_json(), "captures before audits read it"
    assert ChangefeedInfo.from_json(replace(info, audit_s=60).to_json()).audit_s == 60


def test_an_audit_that_is_behind_for_its_whole_period_is_told():
    begun, now = "2026-11-23T06:00:00+00:00", datetime(2026, 11, 23, 7, 0, 1, tzinfo=UTC)
    info = ChangefeedInfo(
        id="feed",
        sink_uri="delta:///lake",
        start_ts=1,
        target_ts=0,
        create_time=begun,
        audit_s=3600,
    )
    assert "behind since it was asked for: the process of the lake's job" in audit_silence(
        info, Audit(), now
    )
    assert not audit_silence(info, Audit(on_time="2026-11-23T06:30:00+00:00"), now)
    assert "behind since 2026-11-23T05" in audit_silence(
        info, Audit(on_time="2026-11-23T05:30:00+00:00"), now
    )
    assert not audit_silence(replace(info, audit_s=7200), Audit(), now)
    assert not audit_silence(replace(info, audit_s=0), Audit(), now)
    assert not audit_silence(info, Audit(on_time="what"), now)


def test_what_is_no_upsert_is_not_told_to_be_repaired():
    told = replace(FOUND, mode="scd2", table="shop.a b", spans=((1, None), (None, None))).text(
        "feed"
    )
    assert told.startswith(
        "shop.a b (id from 1, all): `tidemark cli verify -c feed --table 'shop.a b'` tells the rows"
    )
    assert "--repair" not in told
