"""What `tidemark cli verify` compares at all."""

import pytest

from server.changefeed.info import ChangefeedInfo
from server.verify.errors import VerifyUnsupportedError
from server.verify.verify import check_sink


def changefeed(sink_uri: str) -> ChangefeedInfo:
    return ChangefeedInfo(
        id="shop", sink_uri=sink_uri, start_ts=1, target_ts=0, create_time="", tables=()
    )


@pytest.mark.parametrize(
    "uri", ["delta:///lake", "parquet+s3a://bucket/lake", "postgresql://me@host:5432/lake"]
)
def test_lakes_can_be_compared(uri: str) -> None:
    check_sink(changefeed(uri))


@pytest.mark.parametrize("uri", ["flight://", "flight:"])
def test_a_sink_that_is_no_lake_is_refused_by_its_name(uri: str) -> None:
    with pytest.raises(VerifyUnsupportedError, match="the sink of changefeed shop is flight://"):
        check_sink(changefeed(uri))
