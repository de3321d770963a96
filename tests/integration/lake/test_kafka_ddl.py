"""A DDL is a message in front of the rows that have its columns, once, whatever the job dies of."""

import json

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.target import KafkaTarget
from pyspark_tidemark.lake.kafka.topic import Topic
from pyspark_tidemark.lake.opening import check_evolution
from pyspark_tidemark.lake.schema import Policy

from tests.integration.lake.evolving import EvolvingFeed
from tests.integration.lake.test_kafka import uri_of
from tests.kafka_messages import received, row_messages

pytestmark = pytest.mark.timeout(300)
INT, TEXT = pa.int64(), pa.string()


def applier(feed, manifest, evolution="evolve"):
    return CutApplier(
        feed,
        "bank",
        KafkaTarget(manifest),
        manifest,
        policy=Policy("append", evolution),
        writers=TableWriters(source_options={}, spark=None, parallel=2),
    )


@pytest.fixture
def feed():
    """A table that is made, altered, renamed, emptied and dropped, with rows between."""
    feed = EvolvingFeed()
    feed.create(0, "bank.a", id=INT, v=TEXT)
    feed.put(5, "bank.a", {"id": 1, "v": "x"})
    feed.alter(10, "bank.a", "ALTER TABLE a ADD w BIGINT", id=INT, v=TEXT, w=INT)
    feed.put(15, "bank.a", {"id": 1, "v": "y", "w": 7})
    feed.create(20, "bank.b", id=INT)
    feed.put(25, "bank.b", {"id": 4})
    feed.rename(30, "bank.a", "bank.c")
    feed.put(35, "bank.c", {"id": 2, "v": "z", "w": None})
    feed.truncate(40, "bank.c")
    feed.put(45, "bank.c", {"id": 3, "v": "n", "w": 0})
    feed.drop(50, "bank.b")
    feed.put(55, "bank.c", {"id": 3, "v": "o", "w": 1})
    return feed


STATEMENTS = [
    ("ALTER", "a", "ALTER TABLE a ADD w BIGINT"),
    ("CREATE", "b", "CREATE TABLE bank.b …"),
    ("RENAME", "c", "RENAME TABLE bank.a TO bank.c"),
    ("TRUNCATE", "c", "TRUNCATE TABLE bank.c"),
    ("ERASE", "b", "DROP TABLE bank.b"),
]
CUTS = (5, 10, 20, 30, 40, 50, 60)


def keep(feed, spark, uri):
    """Apply all cuts that are left, in one life."""
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        cuts = applier(feed, manifest)
        at_ts = 0 if manifest.last is None else manifest.last.end_ts
        for end_ts in (ts for ts in CUTS if ts > at_ts):
            cuts.apply(Cut(0, manifest.last.end_ts if manifest.last else 0, end_ts))


def check(spark, broker, topic):
    messages = row_messages(received(spark, broker.address, topic))
    documents = [each.document for each in messages if each.partition == 0]
    statements = [(each["type"], each["table"], each["sql"]) for each in documents if each["isDdl"]]
    assert statements == STATEMENTS
    rows = [each.document for each in messages if not each.document["isDdl"]]
    columns = {(each["table"], each["_tidb"]["commitTs"]): sorted(each["data"][0]) for each in rows}
    assert columns == {
        ("a", 5): ["id", "v"],
        ("a", 15): ["id", "v", "w"],
        ("b", 25): ["id"],
        ("c", 35): ["id", "v", "w"],
        ("c", 45): ["id", "v", "w"],
        ("c", 55): ["id", "v", "w"],
    }
    assert len(rows) == len(columns)


def test_statements_are_in_front_of_their_rows(feed, spark, broker, topic):
    keep(feed, spark, uri_of(broker, topic, "enable-tidb-extension=true"))
    check(spark, broker, topic)


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@pytest.mark.parametrize("step", ["begin", "send_statement", "send", "commit"])
def test_a_death_at_any_step_of_any_cut_changes_nothing(
    feed, spark, broker, topic, step, monkeypatch
):
    uri = uri_of(broker, topic, "enable-tidb-extension=true", "partition-num=1")
    called, lives = getattr(Topic, step), 0
    died: set[tuple[int, str]] = set()

    def around(self, *arguments, **named):
        result = called(self, *arguments, **named)
        place = (self.cut, step)
        if place not in died:
            died.add(place)
            self._producer = None  # the dead abort nothing
            raise Killed
        return result

    announced = KafkaManifest.announce

    def announce(self, start_ts, end_ts, *, moved=False):
        self.topic.cut = end_ts
        return announced(self, start_ts, end_ts, moved=moved)

    monkeypatch.setattr(Topic, step, around)
    monkeypatch.setattr(KafkaManifest, "announce", announce)
    while True:
        lives += 1
        try:
            keep(feed, spark, uri)
        except Killed:
            continue
        break
    assert lives > 4
    check(spark, broker, topic)


def test_a_ddl_stops_the_job_where_it_is_told_to(feed, spark, broker, topic):
    with KafkaManifest.opened(spark, uri_of(broker, topic), "bank") as manifest:
        cuts = applier(feed, manifest, "exception")
        for start_ts, end_ts in ((0, 5), (5, 10)):
            cuts.apply(Cut(0, start_ts, end_ts))
        with pytest.raises(SourceError, match=r"ErrSchemaChanged.*bank\.a"):
            cuts.apply(Cut(0, 10, 20))


def test_debezium_has_a_statement_in_each_partition(feed, spark, broker, topic):
    keep(feed, spark, uri_of(broker, topic, "partition-num=2", protocol="debezium-json"))
    messages = row_messages(received(spark, broker.address, topic))
    payloads = [
        (each.partition, each.document["payload"])
        for each in messages
        if "ddl" in each.document["payload"]
    ]
    for partition in (0, 1):
        found = [payload for at, payload in payloads if at == partition]
        assert [payload["ddl"] for payload in found] == [sql for _, _, sql in STATEMENTS]
        changes = [payload["tableChanges"][0] for payload in found]
        assert [change["type"] for change in changes] == [
            "ALTER",
            "CREATE",
            "ALTER",
            "ALTER",
            "DROP",
        ]
        columns = [column["name"] for column in changes[0]["table"]["columns"]]
        assert columns == ["id", "v", "w"]
    assert json.loads(messages[0].key)


def test_a_topic_cannot_keep_columns_that_a_table_has_lost():
    class Ignoring:
        policy = Policy("append", "ignore")

    with pytest.raises(SourceError, match="ErrModeUnsupported"):
        check_evolution(Ignoring())
