import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.flight.documents import Ack, Describe, FlightRequestError, JobReport, Latest, Plan, Ticket
from sink.flight.feeds import Report

TS = st.integers(0, (1 << 63) - 1)
NAME = st.text(min_size=1)


def body(**members):
    return json.dumps(members).encode()


@given(NAME, NAME, TS, TS, st.booleans())
def test_a_ticket_comes_back_as_it_was_planned(changefeed, table, one, other, before):
    ticket = Ticket(changefeed, table, min(one, other), max(one, other), before)
    assert Ticket.parse(json.dumps(ticket.document()).encode()) == ticket


def test_what_may_be_left_out_has_a_default():
    assert Latest.parse(body(changefeed="a", start=1)) == Latest("a", None, 1, None, None, 200)
    assert Plan.parse(body(changefeed="a", start=1, end=2)) == Plan("a", None, 1, 2, None, False)
    assert Ack.parse(body(changefeed="a", ts=3)) == Ack("a", None, 3, None)


def test_waiting_is_bounded():
    assert Latest.parse(body(changefeed="a", start=1, wait_ms=10**9)).wait_ms == 20_000


def test_unknown_members_are_ignored():
    assert Describe.parse(body(changefeed="a", later="x")) == Describe("a", None, False)


@pytest.mark.parametrize(
    ("parse", "sent", "named"),
    [
        (Describe.parse, b"{", "not JSON"),
        (Describe.parse, b"[]", "object"),
        (Describe.parse, body(), "`changefeed`"),
        (Describe.parse, body(changefeed=""), "`changefeed`"),
        (Latest.parse, body(changefeed="a"), "`start`"),
        (Latest.parse, body(changefeed="a", start=1 << 63), "`start`"),
        (Latest.parse, body(changefeed="a", start=True), "`start`"),
        (Latest.parse, body(changefeed="a", start=1, max_rows=-1), "`max_rows`"),
        (Plan.parse, body(changefeed="a", start=2, end=1), "below"),
        (Plan.parse, body(changefeed="a", start=1, end=2, tables="t"), "`tables`"),
        (Plan.parse, body(changefeed="a", start=1, end=2, slice_bytes=0), "`slice_bytes`"),
        (Plan.parse, body(changefeed="a", start=1, end=2, before=1), "`before`"),
        (Describe.parse, body(changefeed="a", ts=-1), "`ts`"),
        (Ack.parse, body(changefeed="a", ts="1"), "`ts`"),
        (Ack.parse, b"[" * 100_000, "not JSON"),
        (Ack.parse, body(changefeed="a" * (1 << 20), ts=1), "at most"),
        (Ticket.parse, body(changefeed="a", start=1, end=2), "`table`"),
    ],
)
def test_a_wrong_member_is_named(parse, sent, named):
    with pytest.raises(FlightRequestError, match=named):
        parse(sent)


def test_a_report_is_bounded_and_its_error_is_one_line():
    told = body(
        changefeed="a",
        state="failed",
        code="ErrX1",
        message="one\n\x1b[31mtwo\u2028" + "x" * 5000,
        cut_ts=7,
    )
    report = JobReport.parse(told).report
    assert (report.state, report.cut_ts, report.code) == ("failed", 7, "ErrX1")
    assert report.message.startswith("one [31mtwo x")
    assert len(report.message) == 2000
    assert report.commits == ""
    ready = JobReport.parse(body(changefeed="a", state="ready", commits="cut"))
    assert ready.report.commits == "cut"
    for ui in ("http://127.0.0.1:4040", "https://[::1]:4040", "http://a-b.example"):
        assert JobReport.parse(body(changefeed="a", state="ready", ui=ui)).report.ui == ui
    assert JobReport.parse(body(changefeed="a", state="ready", code="ErrX")) == JobReport(
        "a", Report("ready")
    )


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"state": "done"}, "`state`"),
        ({}, "`state`"),
        ({"state": "failed"}, "`code`"),
        ({"state": "failed", "code": "X"}, "`code`"),
        ({"state": "retrying", "code": "Err" + "a" * 61}, "`code`"),
        ({"state": "retrying", "code": "ErrX\n"}, "`code`"),
        ({"state": "ready", "cut_ts": -1}, "`cut_ts`"),
        ({"state": "ready", "commits": "rows"}, "`commits`"),
        ({"state": "ready", "ui": "javascript:alert(1)"}, "`ui`"),
        ({"state": "ready", "ui": "http://a/'onclick=x"}, "`ui`"),
        ({"state": "ready", "ui": "http://a\n"}, "`ui`"),
        ({"state": "failed", "code": "ErrX", "message": 7}, "`message`"),
    ],
)
def test_a_report_of_another_form_is_refused(members, named):
    with pytest.raises(FlightRequestError, match=named):
        JobReport.parse(body(changefeed="a", **members))
