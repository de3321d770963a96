"""For how long a real MariaDB still keeps the log that a changefeed needs."""

import asyncio
import math
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from prometheus_client import REGISTRY

from server.changefeed import keys
from server.changefeed.info import status_json
from server.changefeed.source import SourceUri
from server.puller.mysql.log.opening import present
from server.puller.mysql.log.saved_positions import PositionStore, RetentionMonitor
from server.puller.mysql.session.connection import QueryThreads
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.model.ts import compose
from tests.integration.mysql.replica import following
from tests.mariadb import running_mariadb


async def test_the_time_left_counts_from_when_the_needed_file_was_written_last(
    meta: EtcdMeta,
) -> None:
    with running_mariadb("--binlog-expire-logs-seconds=0") as server:
        options = MySqlOptions.of(SourceUri.parse(server.uri))
        retention = RetentionMonitor("feed", options, meta)
        saved_position = present(options)
        assert math.isinf(retention.left(saved_position).left_s), "it keeps its log for ever"
        server.execute("SET GLOBAL binlog_expire_logs_seconds = 5000")
        assert (
            retention.left(saved_position).left_s == retention.left(saved_position).kept_s == 5000
        ), "the file that is written stays"
        server.execute("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
        for _ in range(2):
            assert 4000 < retention.left(saved_position).left_s <= 5000
        an_hour_ago = replace(
            saved_position, file="of another server", ts=compose(int(time.time() - 3600) * 1000)
        )
        assert 400 < retention.left(an_hour_ago).left_s < 1500, "known by its time only"


async def test_a_running_changefeed_tells_it_and_an_ended_one_does_not(meta: EtcdMeta) -> None:
    def shown() -> float | None:
        return REGISTRY.get_sample_value(
            "tidemark_mysql_log_seconds_until_purge", {"changefeed": "feed"}
        )

    with running_mariadb("--binlog-expire-logs-seconds=5000") as server:
        async with following(server.uri, meta, "shop.*") as feed:
            await meta.put(keys.status("feed"), status_json(feed.start_ts))
            await feed.until(lambda: shown() == 5000)
        assert shown() is None


class Asked(QueryThreads):
    """Says when somebody asks."""

    def __init__(self) -> None:
        super().__init__(1, "asks feed")
        self.begun = asyncio.Event()

    def submit(self, *call: Any, **named: Any) -> "Future[Any]":
        self.begun.set()
        return super().submit(*call, **named)


async def test_a_server_that_hangs_keeps_no_thread_from_others(meta: EtcdMeta) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with running_mariadb() as server:
        options, askers = MySqlOptions.of(SourceUri.parse(server.uri)), Asked()
        await PositionStore(meta, "feed").put(present(options))
        assert server.running is not None
        server.running.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):  # the server has a minute
                asking = tasks.create_task(RetentionMonitor("feed", options, meta).run(askers))
                await askers.begun.wait()
                assert await asyncio.to_thread(divmod, 7, 2) == (3, 1)
                asking.cancel()
        finally:
            server.running.send_signal(signal.SIGCONT)
