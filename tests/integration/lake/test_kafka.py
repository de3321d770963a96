"""A topic holds every change of its changefeed once, in whole cuts, whatever happens to its job."""

import json
from collections import Counter
from contextlib import ExitStack
from decimal import Decimal

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.kafka.client import Clients
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.target import KafkaTarget
from pyspark_tidemark.lake.kafka.topic import Topic
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from tests.kafka_messages import received, row_messages

pytestmark = pytest.mark.timeout(300)
CUTS = (10, 30, 200, 210, 600, 1000)


def uri_of(broker, topic, *options, protocol="canal-json"):
    return SinkUri.parse(
        "&".join([f"kafka://{broker.address}/{topic}?protocol={protocol}", *options])
    )


def applier(changefeed, manifest, name="bank"):
    return CutApplier(
        changefeed,
        name,
        KafkaTarget(manifest),
        manifest,
        policy=Policy("append"),
        writers=TableWriters(source_options={}, spark=None, parallel=2),
    )


def keep(changefeed, spark, uri, ends=CUTS):
    """Apply cuts up to each of `ends`, in two lives."""
    for life in (ends[: len(ends) // 2], ends[len(ends) // 2 :]):
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            cuts = applier(changefeed, manifest)
            for number, end_ts in enumerate(life):
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                cuts.apply(Cut(number, start_ts, end_ts))
                cuts.acknowledge()


def upserted(documents, table):
    """The rows that are left by canal-json's changes of a table."""
    rows = {}
    for document in documents:
        if f"{document['database']}.{document['table']}" != table:
            continue
        for row in document["data"]:
            key = tuple(row[name] for name in document["pkNames"])
            rows.pop(key, None)
            if document["type"] != "DELETE":
                rows[key] = row
    return rows


def test_changes_in_a_topic_come_to_the_replay(changefeed, spark, broker, topic, upstream):
    keep(changefeed, spark, uri_of(broker, topic))
    messages = received(spark, broker.address, topic)
    rows = row_messages(messages)
    assert len(rows) == len(upstream.accounts.rows) + len(upstream.kinds.rows)
    found = upserted([each.document for each in rows], "bank.accounts")
    replay = upstream.accounts.state(upstream.end_ts)
    assert {(int(row["id"]), row["owner"], int(row["balance"])) for row in found.values()} == {
        (row["id"], row["owner"], row["balance"]) for row in replay.values()
    }
    kinds = upserted([each.document for each in rows], "bank.kinds")
    assert {(row["k1"], Decimal(row["k2"])) for row in kinds.values()} == set(
        upstream.kinds.state(upstream.end_ts)
    )


def test_each_partition_ends_each_cut_with_a_marker_that_counts_its_messages(
    changefeed, spark, broker, topic, upstream
):
    keep(changefeed, spark, uri_of(broker, topic, "partition-num=2"))
    messages = received(spark, broker.address, topic)
    assert {each.partition for each in messages} == {0, 1}
    for partition in (0, 1):
        counted, cuts = 0, []
        for each in (message for message in messages if message.partition == partition):
            if each.marker is None:
                counted += 1
                continue
            assert each.value is None
            assert each.marker.messages[partition] == counted
            cuts.append((each.marker.cut.start_ts, each.marker.cut.end_ts))
            counted = 0
        assert cuts == list(zip((0, *CUTS[:-1]), CUTS, strict=True))
        assert counted == 0


def test_a_keys_changes_are_in_one_partition_in_commit_order(
    changefeed, spark, broker, topic, upstream
):
    keep(changefeed, spark, uri_of(broker, topic, "enable-tidb-extension=true"))
    places = {}
    for each in row_messages(received(spark, broker.address, topic)):
        partition, ts = places.get(each.key, (each.partition, 0))
        assert each.partition == partition
        assert each.document["_tidb"]["commitTs"] >= ts
        places[each.key] = each.partition, each.document["_tidb"]["commitTs"]
    assert len({partition for partition, _ in places.values()}) == 3


@pytest.mark.parametrize("protocol", ["canal-json", "debezium-json"])
def test_markers_are_watermarks_with_the_extension(changefeed, spark, broker, topic, protocol):
    keep(changefeed, spark, uri_of(broker, topic, "enable-tidb-extension=true", protocol=protocol))
    markers = [each for each in received(spark, broker.address, topic) if each.marker is not None]
    assert len(markers) == 3 * len(CUTS)
    for each in markers:
        ts = each.marker.cut.end_ts
        if protocol == "canal-json":
            assert (each.document["type"], each.document["_tidb"]) == (
                "TIDB_WATERMARK",
                {"watermarkTs": ts},
            )
        else:
            payload = each.document["payload"]
            assert (payload["op"], payload["source"]["commit_ts"]) == ("m", ts)


def tell_rows_before(table):
    """Let a table's updates have the row as it was, as captures tell it."""
    rows = {}
    for row in table.rows:
        key = tuple(row[name] for name in table.key)
        own = {name: value for name, value in row.items() if not name.startswith("_")}
        if row["_op"] == "update":
            row["_before"] = rows[key]
        rows[key] = own


def test_debezium_messages_have_the_row_before(changefeed, spark, broker, topic, upstream):
    for table in (upstream.accounts, upstream.kinds):
        tell_rows_before(table)
    keep(changefeed, spark, uri_of(broker, topic, protocol="debezium-json"))
    rows, ops = {}, Counter()
    for each in row_messages(received(spark, broker.address, topic)):
        payload = each.document["payload"]
        ops[payload["op"]] += 1
        if payload["op"] != "d":
            assert payload["before"] == rows.get(each.key)
        rows[each.key] = payload["after"]
    assert set(ops) == {"c", "u", "d"}
    kept = [row for row in rows.values() if row is not None]
    assert len(kept) == len(upstream.accounts.state(upstream.end_ts)) + len(
        upstream.kinds.state(upstream.end_ts)
    )


def test_a_cut_that_was_begun_and_not_committed_is_not_seen(
    changefeed, spark, broker, topic, upstream
):
    uri = uri_of(broker, topic)
    with ExitStack() as stack:
        dead = stack.enter_context(KafkaManifest.opened(spark, uri, "bank"))
        applier(changefeed, dead).apply(Cut(0, 0, 10))
        dead.announce(10, 600)
        cuts = applier(changefeed, dead)
        cuts._target.apply(changes_of(changefeed, "bank.accounts", 10, 600))
        dead.topic._producer.flush()
        # The job is gone; its JVM goes on, as that of several jobs does.
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            assert manifest.last.end_ts == 10
            applier(changefeed, manifest).apply(Cut(1, 10, 1000))
        dead.topic._producer = None
    messages = received(spark, broker.address, topic)
    assert len(row_messages(messages)) == len(upstream.accounts.rows) + len(upstream.kinds.rows)
    everything = received(spark, broker.address, topic, "read_uncommitted")
    assert len(everything) > len(messages)


def test_the_marker_is_found_behind_everything_that_was_aborted(changefeed, spark, broker, topic):
    uri = uri_of(broker, topic, "partition-num=1")
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 10))
        manifest.announce(10, 1000)
        target = applier(changefeed, manifest)._target
        for _ in range(20):
            target.apply(changes_of(changefeed, "bank.accounts", 10, 1000))
    aborted = received(spark, broker.address, topic, "read_uncommitted")
    assert len(aborted) > 1600
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        assert manifest.last.end_ts == 10


def test_a_topic_that_is_empty_again_stops_a_job_with_a_checkpoint(
    changefeed, spark, broker, topic
):
    uri = uri_of(broker, topic, "partition-num=1")
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 10))
    clients = Clients(spark, uri)
    gone = clients.classes.java.util.ArrayList()
    gone.add(topic)
    admin = clients.admin()
    admin.deleteTopics(gone).all().get()
    admin.close()
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        assert manifest.last is None
        with pytest.raises(SourceError, match=r"ErrCutGap.*retention"):
            applier(changefeed, manifest).apply(Cut(1, 10, 30))


def changes_of(changefeed, table, start_ts, end_ts):
    meta = changefeed.describe(start_ts).tables[table]
    slices = tuple(changefeed.plan(start_ts, end_ts, [table]))
    return Changes(meta, start_ts, end_ts, slices, changefeed, {})


def test_a_job_that_was_overtaken_can_commit_nothing(changefeed, spark, broker, topic, upstream):
    uri = uri_of(broker, topic)
    with KafkaManifest.opened(spark, uri, "bank") as older:
        applier(changefeed, older).apply(Cut(0, 0, 10))
        older.announce(10, 30)
        applier(changefeed, older)._target.apply(changes_of(changefeed, "bank.accounts", 10, 30))
        # As in another JVM: nobody closes the older one's producer.
        older.topic._properties().remove(older.topic._producer_property())
        with KafkaManifest.opened(spark, uri, "bank") as newer:
            applier(changefeed, newer).apply(Cut(1, 10, 30))
            with pytest.raises(SourceError, match="ErrTargetBusy") as raised:
                applier(changefeed, older).apply(Cut(1, 10, 30))
            assert not raised.value.retryable
            applier(changefeed, newer).apply(Cut(2, 30, 1000))
    rows = row_messages(received(spark, broker.address, topic))
    assert len(rows) == len(upstream.accounts.rows) + len(upstream.kinds.rows)


def test_a_topic_of_another_changefeed_is_refused_and_its_job_goes_on(
    changefeed, spark, broker, topic
):
    uri = uri_of(broker, topic)
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 10))
        with (
            pytest.raises(SourceError, match=r"ErrTargetForeign.*'bank'"),
            KafkaManifest.opened(spark, uri, "other"),
        ):
            pass
        applier(changefeed, manifest).apply(Cut(1, 10, 30))


def test_a_topic_with_messages_of_others_is_refused(spark, broker, topic):
    send_foreign(spark, broker, topic, 3)
    with (
        pytest.raises(SourceError, match=r"ErrTargetForeign.*topic of its own"),
        KafkaManifest.opened(spark, uri_of(broker, topic), "bank"),
    ):
        pass


def test_a_message_of_somebody_else_behind_the_marker_does_not_hide_it(
    changefeed, spark, broker, topic
):
    uri = uri_of(broker, topic)
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 10))
    send_foreign(spark, broker, topic, 200)
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        assert manifest.last.end_ts == 10


def send_foreign(spark, broker, topic, count):
    """Messages of a producer without transactions, into the first partition."""
    clients = Clients(spark, uri_of(broker, topic))
    Topic(clients)  # makes it
    settings = clients._configuration({})
    for side in ("key", "value"):
        settings.put(f"{side}.serializer", "org.apache.kafka.common.serialization.StringSerializer")
    producer = clients.classes.org.apache.kafka.clients.producer.KafkaProducer(settings)
    record = clients.classes.org.apache.kafka.clients.producer.ProducerRecord
    for number in range(count):
        producer.send(record(topic, 0, "k", str(number)))
    producer.close()


def test_a_document_that_no_topic_takes_is_a_named_error(changefeed, spark, broker, topic):
    uri = uri_of(broker, topic, "max-message-bytes=300")
    with (
        KafkaManifest.opened(spark, uri, "bank") as manifest,
        pytest.raises(SourceError, match=r"ErrMessageTooLarge.*bank\..*max-message-bytes"),
    ):
        applier(changefeed, manifest).apply(Cut(0, 0, 1000))


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_messages_read_back(changefeed, spark, broker, topic, compression, upstream):
    with KafkaManifest.opened(
        spark, uri_of(broker, topic, f"compression={compression}"), "bank"
    ) as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 1000))
    rows = row_messages(received(spark, broker.address, topic))
    assert len(rows) == len(upstream.accounts.rows) + len(upstream.kinds.rows)


def test_every_marker_has_the_checksums_of_its_cut(changefeed, spark, broker, topic):
    keep(changefeed, spark, uri_of(broker, topic))
    for each in received(spark, broker.address, topic):
        if each.marker is not None:
            document = json.loads(each.header)
            assert all(len(table["checksum"]) == 16 for table in document["cut"]["tables"])
            rows = sum(table["rows"] for table in document["cut"]["tables"])
            assert rows == sum(document["messages"])
