"""For how long logs are kept, as a server's variables say."""

import math

import pytest

from server.puller.mysql.session.checks import kept_s


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"binlog_expire_logs_seconds": "3600", "expire_logs_days": "10"}, 3600),
        ({"binlog_expire_logs_seconds": "0", "expire_logs_days": "0.5"}, 43_200),
        ({"binlog_expire_logs_seconds": "0", "expire_logs_days": "0"}, math.inf),
        ({"binlog_expire_logs_seconds": "3600", "binlog_expire_logs_auto_purge": "OFF"}, math.inf),
        ({}, math.inf),
    ],
)
def test_logs_are_kept_as_long_as_the_variables_say(variables: dict[str, str], kept: float) -> None:
    assert kept_s(variables) == kept
