"""Tables that are split over captures: a reader gets every row once, in the order of the whole
table, while captures join, die and leave. Transactions take rows from one part to another.
"""

import random
import time

import pytest

from storage.tidb.record import encode_record, record_key
from tests.integration.capture.many_tables import NAMES, TABLES, Feed, Follower
from tests.integration.capture.processes import (
    PATIENCE_S,
    run,
    running_cluster,
    split,
    transaction_client,
)
from tests.integration.capture.test_moves import captures_of_tables, followed, write_until

pytest.importorskip("tikv_client")
OPS = ("delete", "update", "insert")
KEYS = 60
SPLIT = TABLES[:2]
BORDERS = (20, 40)


class MovingRows(Feed):
    """Each transaction deletes, changes and inserts rows all over each table."""

    def __init__(self, cluster, store, **more):
        super().__init__(cluster, store, **more)
        self._random = random.Random(20)
        self._rows = {}

    def write(self, transactions):
        for _ in range(transactions):
            self.written += 1
            keys, changes = self._random.sample(range(KEYS), 6), []
            txn = self._store.begin(pessimistic=False)
            for place, key in enumerate(keys):
                before = self._rows.get(key)
                if before is not None and place < 3:
                    changes.append(("delete", key, before))
                    del self._rows[key]
                    for table in TABLES:
                        txn.delete(record_key(table.id, key))
                else:
                    changes.append(("insert" if before is None else "update", key, self.written))
                    self._rows[key] = self.written
                    for table in TABLES:
                        txn.put(*encode_record(table, {"id": key, "v": self.written}))
            txn.commit()
            self.expected += sorted(changes, key=lambda each: (OPS.index(each[0]), each[1]))


class Folding(Follower):
    """Has what the tables hold, from changes and rows of a dump."""

    def __init__(self, feed):
        super().__init__(feed)
        self.tables = {name: {} for name in NAMES}

    def take(self, reader):
        super().take(reader)
        for name, table in self.tables.items():
            for op, key, value in self.rows[name]:
                if op == "delete":
                    table.pop(key, None)
                else:
                    table[key] = value
            self.rows[name].clear()


def split_over(cluster, count):
    """Whether the big tables are on so many captures each, and the others on one."""
    captures = captures_of_tables(cluster)
    counts = [len({*captures[name].split(", ")} - {""}) for name in NAMES]
    return counts == [count] * len(SPLIT) + [1] * (len(NAMES) - len(SPLIT))


@pytest.mark.timeout(900)
def test_split_tables_are_read_whole_while_captures_join_die_and_leave(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        for table in SPLIT:
            for border in BORDERS:
                run(split(cluster.pd, record_key(table.id, border)))
        feed = MovingRows(cluster, store, region_threshold=3)
        feed.write(20)
        assert split_over(cluster, 1)
        with followed(feed):
            second = cluster.another_capture()
            write_until(feed, lambda: split_over(cluster, 2))
            third = cluster.start(
                "capture", "--coordinator", cluster.pd, "--data-dir", str(tmp_path / "third")
            )
            write_until(feed, lambda: split_over(cluster, 3))
            feed.write(20)
            assert "changefeed error" not in cluster.capture.log.read_text()
            path, table = "/api/v2/changefeeds/many", f"tableID={SPLIT[0].id}"
            move = f"{path}/move_split_table?{table}&targetNodeID="
            assert cluster.http("POST", f"{move}nobody")[0] == 400
            target = captures_of_tables(cluster)[NAMES[0]].split(", ")[1]
            assert cluster.http("POST", f"{move}{target}") == (200, {})
            assert captures_of_tables(cluster)[NAMES[0]] == ", ".join([target] * 3)
            feed.write(10)
            for name, captures in (("merge_table", 1), ("split_table_by_region_count", 3)):
                assert cluster.http("POST", f"{path}/{name}?{table}") == (200, {})
                assert len(captures_of_tables(cluster)[NAMES[0]].split(", ")) == captures
                feed.write(10)

            third.kill()
            write_until(feed, lambda: split_over(cluster, 2))
            third.start()
            write_until(feed, lambda: split_over(cluster, 3))

            ids = {each["address"]: each["id"] for each in cluster.cli("capture", "list")}
            for leaving, left in ((second, 2), (third, 1)):
                cluster.cli("capture", "drain", ids[leaving.endpoints["capture"]])
                write_until(feed, lambda left=left: split_over(cluster, left))
                assert leaving.terminate() == 0
            feed.write(20)
        assert cluster.cli("changefeed", "query", "-c", "many")["state"] == "normal"
        assert cluster.cli("changefeed", "query", "-c", "many")["region_threshold"] == 3


@pytest.mark.timeout(900)
def test_a_dump_of_a_split_table_brings_every_row_while_its_parts_change(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        for table in SPLIT:
            for border in BORDERS:
                run(split(cluster.pd, record_key(table.id, border)))
        before = {key: -key for key in range(KEYS, KEYS + 800)}
        for table in TABLES:
            txn = store.begin(pessimistic=False)
            for key, value in before.items():
                txn.put(*encode_record(table, {"id": key - KEYS // 2, "v": value}))
            txn.commit()
        for table in SPLIT:
            run(split(cluster.pd, record_key(table.id, KEYS + 360)))
        feed = MovingRows(cluster, store, region_threshold=3)
        feed._rows = {key - KEYS // 2: value for key, value in before.items()}
        second = cluster.another_capture()
        write_until(feed, lambda: split_over(cluster, 2))
        reader = Folding(feed)
        reader.start()
        try:
            flags = ("-c", "many", "--rows-per-second", "150")
            assert cluster.cli("changefeed", "dumpstart", *flags)["state"] == "running"
            feed.write(10)
            third = cluster.start(
                "capture", "--coordinator", cluster.pd, "--data-dir", str(tmp_path / "third")
            )
            write_until(feed, lambda: split_over(cluster, 3))
            third.kill()
            feed.write(10)

            def is_over():
                assert reader.error is None
                answer = cluster.cli("changefeed", "dumpstatus", "-c", "many")
                return isinstance(answer, dict) and answer["state"] == "finished"

            write_until(feed, is_over)
            held = {key: value for key, value in feed._rows.items() if value is not None}
            deadline = time.monotonic() + PATIENCE_S
            while any(table != held for table in reader.tables.values()):
                assert reader.error is None
                assert time.monotonic() < deadline, "the reader's tables are not those of the store"
                time.sleep(0.2)
        finally:
            reader.ending.set()
            reader.join()
        assert second.terminate() == 0
