"""What is wrong with brokers, a topic or a login is a named error that says what to do; a broker
that is down for a while only makes the job wait, and nothing is there twice.
"""

import subprocess
import threading

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut import Cut
from pyspark_tidemark.lake.kafka import client
from pyspark_tidemark.lake.kafka import topic as topics
from pyspark_tidemark.lake.kafka.client import Clients
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.topic import Topic
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.lake.test_kafka import applier, changes_of, uri_of
from tests.kafka import PASSWORD, USER, running_broker, tls_settings
from tests.kafka_messages import received, row_messages

pytestmark = pytest.mark.timeout(400)


def opened(spark, uri):
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        return manifest.last


@pytest.fixture
def login(tmp_path):
    """Options that log in as the broker's user."""
    (tmp_path / "password").write_text(PASSWORD + "\n")
    return f"sasl-user={USER}&sasl-mechanism=plain&password-file={tmp_path}/password"


def with_login(broker, topic, login):
    return SinkUri.parse(f"kafka://{broker.sasl_address}/{topic}?protocol=canal-json&{login}")


def test_who_logs_in_writes(changefeed, spark, broker, topic, login, upstream):
    with KafkaManifest.opened(spark, with_login(broker, topic, login), "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 1000))
    rows = row_messages(received(spark, broker.address, topic))
    assert len(rows) == len(upstream.accounts.rows) + len(upstream.kinds.rows)


def test_a_wrong_password_is_a_named_error_without_the_password(
    spark, broker, topic, login, tmp_path, capfd
):
    (tmp_path / "password").write_text("geheim-12345")
    with pytest.raises(SourceError, match=r"ErrCredentials.*sasl-user") as raised:
        opened(spark, with_login(broker, topic, login))
    assert not raised.value.retryable
    shown = str(raised.value) + "".join(capfd.readouterr())
    assert "geheim-12345" not in shown
    settings = spark.sparkContext.getConf().getAll()
    assert "geheim-12345" not in str(settings)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a broker's certificate and a client's, by openssl."""
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1")
    openssl(*new, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        request = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}")
        openssl(*request, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key")
        openssl(*signed, "-days", "1", "-extfile", "san", "-out", f"{name}.crt")
    both = (directory / "server.key").read_text() + (directory / "server.crt").read_text()
    (directory / "server.pem").write_text(both)
    return directory


def test_over_tls_a_client_needs_its_certificate(
    changefeed, spark, broker, certificates, tmp_path, upstream, monkeypatch
):
    del broker
    for timeout in ("_CALL_TIMEOUT_MS", "_REQUEST_TIMEOUT_MS"):
        monkeypatch.setattr(client, timeout, 10_000)
    with running_broker(tmp_path / "kafka", tls_settings(certificates)) as server:
        place = f"kafka://{server.tls_address}/lake?protocol=canal-json&enable-tls=true"
        ours = f"&cert={certificates}/client.crt&key={certificates}/client.key"
        uri = SinkUri.parse(f"{place}&ca={certificates}/ca.pem{ours}")
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            applier(changefeed, manifest).apply(Cut(0, 0, 1000))
        rows = row_messages(received(spark, server.address, "lake"))
        assert len(rows) == len(upstream.accounts.rows) + len(upstream.kinds.rows)
        for lacking in (f"{place}&ca={certificates}/ca.pem", f"{place}{ours}"):
            with pytest.raises(SourceError, match=r"ErrCredentials|ErrTargetUnavailable"):
                opened(spark, SinkUri.parse(lacking))
        wrong = f"{place}&ca={certificates}/ca.pem&cert={certificates}/client.crt"
        with pytest.raises(SourceError, match=r"ErrCredentials"):
            opened(spark, SinkUri.parse(f"{wrong}&key={certificates}/san"))


def test_a_topic_that_is_not_there_is_made_only_if_that_is_allowed(spark, broker, topic):
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*auto-create-topic is false"):
        opened(spark, uri_of(broker, topic, "auto-create-topic=false"))
    assert opened(spark, uri_of(broker, topic, "partition-num=2")) is None
    assert Topic(Clients(spark, uri_of(broker, topic))).partitions == 2
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*has 2 partitions"):
        opened(spark, uri_of(broker, topic, "partition-num=3"))


def test_a_compacted_topic_needs_markers_with_a_value(changefeed, spark, broker, topic):
    make_topic(spark, broker, topic, {"cleanup.policy": "compact"})
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*enable-tidb-extension=true"):
        opened(spark, uri_of(broker, topic))
    uri = uri_of(broker, topic, "enable-tidb-extension=true")
    with KafkaManifest.opened(spark, uri, "bank") as manifest:
        applier(changefeed, manifest).apply(Cut(0, 0, 10))
    assert opened(spark, uri).end_ts == 10


def test_a_row_that_the_topic_does_not_take_is_found_before_it_is_sent(
    changefeed, spark, broker, topic
):
    make_topic(spark, broker, topic, {"max.message.bytes": "400"})
    with (
        KafkaManifest.opened(spark, uri_of(broker, topic), "bank") as manifest,
        pytest.raises(SourceError, match=r"ErrMessageTooLarge.*max.message.bytes"),
    ):
        applier(changefeed, manifest).apply(Cut(0, 0, 1000))
    assert received(spark, broker.address, topic) == []


def make_topic(spark, broker, topic, settings):
    clients = Clients(spark, uri_of(broker, topic))
    kafka = clients.classes.org.apache.kafka.clients.admin
    configuration = clients.classes.java.util.HashMap()
    for name, value in settings.items():
        configuration.put(name, value)
    listed = clients.classes.java.util.ArrayList()
    optional = clients.classes.java.util.Optional
    listed.add(kafka.NewTopic(topic, optional.of(1), optional.empty()).configs(configuration))
    admin = clients.admin()
    admin.createTopics(listed).all().get()
    admin.close()


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no.such.host.invalid:9092"])
def test_brokers_that_do_not_answer_are_waited_for_by_starting_again(
    spark, broker, monkeypatch, host
):
    for timeout in ("_CALL_TIMEOUT_MS", "_REQUEST_TIMEOUT_MS"):
        monkeypatch.setattr(client, timeout, 2000)
    uri = SinkUri.parse(f"kafka://{host}/t?protocol=canal-json")
    with pytest.raises(SourceError, match=r"ErrTargetUnavailable.*do not answer") as raised:
        opened(spark, uri)
    assert raised.value.retryable


def test_a_broker_that_goes_and_comes_back_amid_a_cut_costs_time_only(
    changefeed, spark, broker, tmp_path, upstream
):
    del broker  # it skips where there is none
    with running_broker(tmp_path / "kafka") as server:
        uri = uri_of(server, "lake")
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            cuts = applier(changefeed, manifest)
            cuts.apply(Cut(0, 0, 200))
            server.kill()
            back = threading.Timer(5.0, server.start)
            back.start()
            cuts.apply(Cut(1, 200, 600))
            back.join()
            cuts.apply(Cut(2, 600, 1000))
        messages = received(spark, server.address, "lake")
    assert len(row_messages(messages)) == len(upstream.accounts.rows) + len(upstream.kinds.rows)


def test_a_transaction_that_was_open_for_too_long_is_written_again(
    changefeed, spark, broker, tmp_path, upstream
):
    del broker
    quickly = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
    with running_broker(tmp_path / "kafka", quickly) as server:
        uri = uri_of(server, "lake", "transaction-timeout-ms=1000")
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            applier(changefeed, manifest).apply(Cut(0, 0, 10))
            manifest.announce(10, 600)
            target = applier(changefeed, manifest)._target
            target.apply(changes_of(changefeed, "bank.accounts", 10, 600))
            manifest.topic._producer.flush()
            until_ended(manifest.topic)
            with pytest.raises(
                SourceError, match=r"too long.*raise transaction-timeout-ms"
            ) as raised:
                applier(changefeed, manifest).apply(Cut(1, 10, 600))
            assert raised.value.retryable
        uri = uri_of(server, "lake")
        with KafkaManifest.opened(spark, uri, "bank") as manifest:
            assert manifest.last.end_ts == 10
            applier(changefeed, manifest).apply(Cut(1, 10, 1000))
        messages = received(spark, server.address, "lake")
    assert len(row_messages(messages)) == len(upstream.accounts.rows) + len(upstream.kinds.rows)


def until_ended(topic):
    """Wait until the brokers have ended what is open: everything in the partition is decided."""
    admin = topic._clients.admin()
    end = topic._end_offset(admin, "READ_UNCOMMITTED")
    waits = threading.Event()
    for _ in range(600):
        if topic._end_offset(admin, "READ_COMMITTED") > end:
            break
        waits.wait(0.1)
    admin.close()


def test_an_open_transaction_of_somebody_else_is_waited_for_then_named(
    spark, broker, topic, monkeypatch
):
    monkeypatch.setattr(topics, "_DECIDED_WAIT_S", 1.0)
    clients = Clients(spark, uri_of(broker, topic))
    Topic(clients)
    other = clients.producer("somebody-else")
    other.initTransactions()
    other.beginTransaction()
    record = clients.classes.org.apache.kafka.clients.producer.ProducerRecord
    other.send(record(topic, 0, b"k", b"v"))
    other.flush()
    with pytest.raises(SourceError, match=r"ErrTargetUnavailable.*transaction open"):
        opened(spark, uri_of(broker, topic))
    other.abortTransaction()
    other.close()
    assert opened(spark, uri_of(broker, topic)) is None
