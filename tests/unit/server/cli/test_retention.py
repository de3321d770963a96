"""How --retain is written, and how history and readers are shown."""

import argparse

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.info import READER_TTL_S, ChangefeedInfo
from server.changefeed.view import detail, reader_rows
from server.cli.arguments import retention
from sink.retention import Retention
from storage.model.ts import compose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24h", Retention(age_s=86_400)),
        ("90m", Retention(age_s=5_400)),
        ("50GiB", Retention(size_bytes=50 << 30)),
        ("1 tib", Retention(size_bytes=1 << 40)),
        ("24h,50GiB", Retention(86_400, 50 << 30)),
        ("50GiB|24h", Retention(86_400, 50 << 30)),
        ("off", Retention()),
    ],
)
def test_a_time_a_size_or_both(text, expected):
    assert retention(text) == expected


@pytest.mark.parametrize(
    "text", ["", "24", "5GB", "24h,48h", "1GiB,2GiB", "off,24h", "-1h", "0GiB", "9" * 18 + "TiB"]
)
def test_what_is_neither_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        retention(text)


def info(**more):
    return ChangefeedInfo(
        id="a", sink_uri="delta:///a", start_ts=1, target_ts=0, create_time="", **more
    )


def test_a_record_without_these_settings_is_as_before_and_one_with_them_is_read_again():
    assert b"retain" not in info().to_json()
    assert b"reader_ttl" not in info().to_json()
    assert info().reader_limit_s == READER_TTL_S
    kept = info(retain_s=60, retain_bytes=7, reader_ttl_s=5)
    again = ChangefeedInfo.from_json(kept.to_json())
    assert again == kept
    assert (again.retention, again.reader_limit_s) == (Retention(60, 7), 5)


def test_history_and_readers_are_shown_where_there_are_any():
    shown = detail(pb.Changefeed(id="a", checkpoint_ts=compose(10_000)))
    assert not {"retain", "readers", "reader_ttl_seconds"} & shown.keys()
    reader = pb.Reader(name="etl", checkpoint_ts=compose(4_000), state="let go", silent_s=9)
    changefeed = pb.Changefeed(
        id="a",
        retain_s=60,
        reader_ttl_s=5,
        readers=[reader],
        kept_history=pb.KeptHistory(kept_ts=compose(3_000), bytes=12),
    )
    shown = detail(changefeed)
    assert shown["retain"] == {
        "seconds": 60,
        "bytes": 0,
        "kept_tso": compose(3_000),
        "kept_time": "1970-01-01T00:00:03.000+00:00",
        "kept_bytes": 12,
    }
    assert shown["reader_ttl_seconds"] == 5
    [row] = reader_rows(changefeed, 10.0)
    assert (row["name"], row["state"], row["lag_seconds"]) == ("etl", "let go", 6.0)
