import json
from types import SimpleNamespace

import pytest
from pyspark_tidemark.progress import Lag, LagListener, document, lags

SECOND = 1000 << 18


def source(end, latest):
    return {"endOffset": end, "latestOffset": latest, "numInputRows": 7}


def offset(seconds):
    return {"ts": seconds * SECOND, "changefeed": "shop"}


def progress(*sources):
    text = json.dumps({"sources": sources})
    return SimpleNamespace(name="orders", id="1-2", batchId=3, json=text)


def test_lag_is_told_in_both_parts():
    [lag] = lags(progress(source(offset(100), offset(103))), now_s=105.0)
    assert lag == Lag("orders", "shop", 3, 7, 100 * SECOND, 103 * SECOND, 3.0, 5.0)


@pytest.mark.parametrize("untold", [None, "null"])
def test_without_the_newest_offset_only_the_clock_tells(untold):
    [lag] = lags(progress(source(offset(100), untold)), now_s=99.0)
    assert (lag.query_s, lag.total_s) == (0.0, 0.0)
    assert not list(lags(progress(source(untold, offset(1))), now_s=1.0))


def test_other_sources_and_sources_without_a_position_are_left_out():
    others = [
        source(None, offset(1)),
        source({"0": 5}, None),
        source("7", None),
        source(7, None),
        source({"ts": 1}, None),
    ]
    assert not list(lags(progress(*others), now_s=1.0))


def test_a_listener_reports_each_source():
    seen = []
    event = SimpleNamespace(
        progress=progress(source(offset(1), offset(1)), source(offset(2), offset(2)))
    )
    LagListener(seen.append).onQueryProgress(event)
    assert [lag.end_ts for lag in seen] == [SECOND, 2 * SECOND]


@pytest.mark.parametrize("make", [str, json.dumps])
def test_what_pyspark_makes_of_an_offset_does_not_matter(make):
    """4.1 shows a JSON object as Python does, 4.2 as JSON does: neither is read."""
    said = progress(source(offset(1), offset(2)))
    said.sources = [SimpleNamespace(endOffset=make(offset(1)), latestOffset=make(None))]
    [lag] = lags(said, now_s=3.0)
    assert (lag.end_ts, lag.resolved_ts) == (SECOND, 2 * SECOND)


def test_the_line_of_a_cut_tells_both_lags_and_the_steps():
    line = document(3, 100 * SECOND, 103 * SECOND, 105.0, {"addBatch": 0.0124})
    assert line == {
        "batch": 3,
        "end_ts": 100 * SECOND,
        "resolved_ts": 103 * SECOND,
        "spark_lag_s": 3.0,
        "captures_lag_s": 2.0,
        "ms": {"addBatch": 12},
    }


@pytest.mark.parametrize("resolved", [0, 99])
def test_a_lake_is_never_ahead_of_the_captures(resolved):
    line = document(3, 100 * SECOND, resolved * SECOND, 99.0, {})
    assert (line["spark_lag_s"], line["captures_lag_s"]) == (0.0, 0.0)
