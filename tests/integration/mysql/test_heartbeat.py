"""Heartbeat rows, without which the cuts of an idle server stand still."""

import pytest
from structlog.testing import capture_logs

from server.puller.mysql.log import heartbeat
from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import following
from tests.mariadb import running_mariadb


async def test_they_go_on_where_the_server_only_read_for_a_while(
    meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "AGAIN_S", 0.2)
    with running_mariadb() as server, capture_logs() as logs:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        server.execute("SET GLOBAL read_only=ON")
        uri = f"{server.uri}?idle-row-ms=100&heartbeat-ms=100"
        async with following(uri, meta, "a.*") as feed:
            await feed.until(lambda: any("no heartbeat rows" in each["event"] for each in logs))
            ts = max(feed.target.resolved.values(), default=0)
            server.execute("SET GLOBAL read_only=OFF")
            await feed.until(lambda: max(feed.target.resolved.values(), default=0) > ts)
    assert sum("no heartbeat rows" in each["event"] for each in logs) == 1
