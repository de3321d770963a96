"""A changefeed gets another table filter while it runs, is paused or has failed, from MariaDB and
from a real store to a lake in PostgreSQL: tables come whole, others stay as they were.
"""

import contextlib
import itertools
import re
import threading

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_job_errors import until
from tests.integration.lake.test_ways_out import Shop, running_services
from tests.integration.lake.test_ways_out_tidb import Feed, LakeJobLoop, Source
from tests.integration.tidb.pumps import FLAGS

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def services(tmp_path_factory, postgres):
    directory = tmp_path_factory.mktemp("filters")
    with running_services(directory, postgres.create("filters")) as running:
        yield running


@pytest.fixture
def shop(services, request):
    """A changefeed's database with `a`, `b` and a large `c`; there is no lake job yet."""
    made = Shop("f" + re.sub(r"[\W_]", "", request.node.name)[-20:], *services)
    made.execute(
        "CREATE TABLE c (id INT PRIMARY KEY, v INT, name VARCHAR(20))",
        "INSERT INTO c SELECT seq, seq * 2, CONCAT('n', seq) FROM seq_1_to_3000",
        "INSERT INTO a SELECT seq, seq, seq FROM seq_1_to_50",
        "INSERT INTO b VALUES (1), (2)",
    )
    yield made
    made.cli("remove", "--no-confirm")


def update(shop, *tables, flags=()):
    rules = [part for table in tables for part in ("--filter", f"{shop.name}.{table}")]
    return shop.cli("update", *rules, *flags)


def upstream(shop, table):
    return sorted(shop.execute(f"SELECT * FROM {table}"))


def whole(shop, *tables):
    """Wait until these tables of the lake are as the upstream's."""
    for table in tables:
        until(lambda table=table: shop.lake(table) == upstream(shop, table), True)


def in_force(shop):
    until(lambda: "filter_update" in shop.cli("query"), False)


@contextlib.contextmanager
def busy(shop):
    """Somebody writes to all tables, for the block."""
    stop = threading.Event()

    def write():
        for number in itertools.count(10_000):
            if stop.is_set():
                return
            shop.execute(
                f"INSERT INTO a VALUES ({number}, 1, 1)",
                f"UPDATE c SET v = v + 1 WHERE id % 97 = {number % 97}",
                f"DELETE FROM c WHERE id = {number % 3000}",
                f"INSERT INTO b VALUES ({number})",
            )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def test_tables_come_whole_and_go_while_all_are_written_to(shop):
    shop.create(tables=["a", "b"])
    shop.cli("dumpstart")
    with shop.keeper():
        whole(shop, "a", "b")
        with busy(shop):
            planned = update(shop, "a", "c", flags=["--dry-run"])
            assert planned["filter_change"] == {
                "coming": [f"{shop.name}.c"], "going": [f"{shop.name}.b"], "ineligible": {},
            }  # fmt: skip
            assert "filter_update" not in shop.cli("query"), "only asked"
            answer = update(shop, "a", "c")
            assert answer["filter_change"] == planned["filter_change"]
            in_force(shop)
        whole(shop, "a", "c")
        left = shop.lake("b")
        assert left, "it stays"
        shop.execute("DELETE FROM b WHERE id = 1", "INSERT INTO b VALUES (5)")
        whole(shop, "a")
        assert shop.lake("b") == left
        # It comes again: what was deleted meanwhile is not there.
        update(shop, "*")
        in_force(shop)
        whole(shop, "a", "b", "c")
        status = {each["table"]: each["state"] for each in shop.cli("dumpstatus")["status"]}
        assert {status[f"{shop.name}.{each}"] for each in ("a", "b", "c")} == {"done"}
        assert shop.state() == ("normal", None)
        queries = [each["query"] for each in shop.cli("query")["ddls"]]
        assert queries == [
            f"/* tidemark changefeed update --filter {shop.name}.a {shop.name}.c */",
            f"/* tidemark changefeed update --filter {shop.name}.* */",
        ]
        # A table with another mask begins anew, with no row of before.
        answer = shop.cli("update", "--mask", f"{shop.name}.c=name:mask.with.4.chars")
        assert answer["filter_change"]["changing"] == [f"{shop.name}.c"]
        in_force(shop)
        masked = [(number, value, "****") for number, value, _ in upstream(shop, "c")]
        until(lambda: shop.lake("c") == masked, True)
        shop.execute("UPDATE c SET name = 'other' WHERE id = 2", "DELETE FROM a WHERE id = 1")
        whole(shop, "a", "b")
        assert shop.state() == ("normal", None)


def test_what_keeps_a_changefeed_from_going_on_is_left_out(shop):
    shop.create(tables=["a", "c"])
    with shop.keeper():
        shop.execute("INSERT INTO a VALUES (100, 1, 1)")
        until(shop.lake, [(100, 1, 1)])
        shop.execute("ALTER TABLE c DROP PRIMARY KEY", "INSERT INTO a VALUES (101, 1, 1)")
        shop.fails_with("ErrTableIneligible")
        update(shop, "a", "b")
        assert shop.cli("resume")["state"] == "normal"
        in_force(shop)
        whole(shop, "b")
        until(shop.lake, [(100, 1, 1), (101, 1, 1)])


def test_an_update_waits_for_the_lake_and_outlives_its_capture(shop, services):
    _, cluster, _, _ = services
    shop.create(tables=["a"])
    shop.cli("pause")
    update(shop, "a", "b")
    shop.execute("INSERT INTO a VALUES (100, 1, 1)")
    cluster.capture.kill()
    cluster.capture.start()
    until(lambda: shop.cli("query")["state"], "stopped")
    # Others before the first was in force: no table would be replicated until then, or some.
    assert "ErrChangefeedUpdateRefused" in update(shop, "b", "c")
    update(shop, "a", "c")
    shop.execute("ALTER TABLE c ADD later INT DEFAULT 7", "UPDATE c SET later = 8 WHERE id < 9")
    shop.cli("resume")
    assert "is at the target" in shop.cli("query")["filter_update"]["waits_for"]
    cluster.capture.kill()
    cluster.capture.start()
    with shop.keeper():
        in_force(shop)
        whole(shop, "c")
        until(shop.lake, [(100, 1, 1)])
        assert not shop.lake("b"), "the filter that takes it was never in force"


def test_tables_come_without_what_they_hold_by_no_dump_and_schema_changes_go_on(shop):
    shop.create(tables=["a"])
    with shop.keeper():
        update(shop, "*", flags=["--no-dump"])
        in_force(shop)
        shop.execute(
            "INSERT INTO c VALUES (7000, 1, 'x')",
            "ALTER TABLE c RENAME COLUMN name TO title, ADD z INT",
            "INSERT INTO c VALUES (7001, 1, 'y', 5)",
            "CREATE TABLE d (id INT PRIMARY KEY)",
            "INSERT INTO d VALUES (1)",
        )
        until(lambda: shop.lake("d"), [(1,)])
        assert shop.lake("c") == [(7000, 1, "x", None), (7001, 1, "y", 5)]


def test_a_filter_is_in_force_behind_tables_that_are_read_again(shop):
    shop.create(tables=["a"])
    shop.cli("dumpstart")
    with shop.keeper():
        whole(shop, "a")
        shop.cli("dumppause")
        shop.execute("SET sql_mode=''", "UPDATE a SET v = NULL WHERE id < 20")
        whole(shop, "a")
        shop.execute("SET sql_mode=''", "ALTER TABLE a MODIFY v INT NOT NULL")
        until(lambda: "rereads" in shop.cli("query"), True)
        update(shop, "a", "c")
        shop.execute("INSERT INTO a VALUES (5000, 1, 1)", "INSERT INTO c VALUES (5000, 1, 'x')")
        until(lambda: "rereads" in shop.cli("query"), True)
        assert "filter_update" in shop.cli("query")
        shop.cli("dumpresume")
        in_force(shop)
        whole(shop, "a", "c")
        assert shop.state() == ("normal", None)


def test_a_filter_that_cannot_be_is_refused_and_nothing_changes(shop):
    shop.execute("CREATE TABLE keyless (id INT)")
    shop.create(tables=["a"])
    before = shop.cli("query")["filter"]
    for tables, code in (
        (["nothing"], "ErrAPIInvalidParam"),
        (["["], "ErrFilterRuleInvalid"),
        (["a", "keyless"], "ErrTableIneligible"),
    ):
        refused = update(shop, *tables)
        assert code in refused, refused
    found = shop.cli("query")
    assert (found["filter"], "filter_update" in found) == (before, False)


@pytest.mark.parametrize(("workers", "scheme"), [("1", ""), ("2", ""), ("1", "pump")])
def test_tables_of_a_cluster_come_whole_and_go_and_come_again(tmp_path, postgres, workers, scheme):
    with running_cluster(tmp_path, "--workers", workers) as cluster:
        pump = ""
        if scheme:
            data = ["--coordinator", cluster.pd, "--data-dir", str(tmp_path / "pump")]
            daemon = cluster.start("pump", *data, *FLAGS, "--fake-binlog-seconds", "0.2")
            pump = daemon.endpoints["pump"]
        source = Source(cluster.pd, pump).opened()
        try:
            target = postgres.create(f"filters{scheme}{workers}")
            check_cluster(cluster, source, target, f"{scheme}://" if scheme else "")
        finally:
            source.stop()


def check_cluster(cluster, source, target, source_uri):
    feed = Feed(cluster, "filtered", target)
    for name, count in (("a", 20), ("b", 30), ("parted", 40)):
        source.create(name, count, **({"partitions": 3} if name == "parted" else {}))
    uri = ["--source-uri", source_uri] if source_uri else []
    feed.create("--filter", "shop.a", "--filter", "shop.b", *uri)
    feed.cli("dumpstart")
    with LakeJobLoop(feed):
        for name in ("a", "b"):
            until(lambda name=name: feed.lake(name), source.rows(name))
        feed.cli("update", "--filter", "shop.a", "--filter", "shop.parted")
        source.put("parted", 1000, 1001)
        source.put("a", 1002)
        until(lambda: "filter_update" in feed.cli("query"), False)
        source.put("parted", 1003)
        for name in ("a", "parted"):
            until(lambda name=name: feed.lake(name), source.rows(name))
        left = feed.lake("b")
        source.put("b", 1004)
        # The same table, by its id: what was read of it before does not count.
        feed.cli("update", "--filter", "shop.*")
        source.put("b", 1005)
        for name in ("a", "b", "parted"):
            until(lambda name=name: feed.lake(name), source.rows(name))
        assert len(left) == 30
        assert feed.state() == ("normal", None)
