"""A sink URI of Kafka is TiCDC's, is checked whole, and shows no secret."""

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.kafka.client import _connection
from pyspark_tidemark.lake.kafka.settings import KafkaSettings
from pyspark_tidemark.sink_uri import SinkUri, redacted

UNUSUAL = "debezium-disable-schema=true&auto-create-topic=false&enable-tidb-extension=true"
LOGIN = "sasl-user=alice&sasl-mechanism=SCRAM-SHA-512&password-env=TIDEMARK_SECRET_KAFKA"
CLEAR = LOGIN.replace("SCRAM-SHA-512", "PLAIN")


def test_brokers_and_topic_are_its_place():
    uri = SinkUri.parse("kafka://k1:9093,k2,[::1]:9094/shop.v1?protocol=canal-json&mode=append")
    assert (uri.format, uri.host, uri.path) == ("kafka", "k1:9093,k2:9092,[::1]:9094", "shop.v1")
    assert (uri.is_topic, uri.is_lake, uri.is_database, uri.has_place) == (True, True, False, False)
    assert uri.settings == {"mode": "append"}
    assert SinkUri.parse(str(uri)) == uri
    uri.check_directory()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("kafka://k/t?protocol=canal-json", ("canal-json", None, True, True, False)),
        ("kafka://k/t?protocol=debezium", ("debezium-json", None, True, True, False)),
        (
            f"kafka://k/t?protocol=debezium-json&partition-num=6&{UNUSUAL}",
            ("debezium-json", 6, False, False, True),
        ),
    ],
)
def test_options_are_those_of_ticdc(given, expected):
    settings = KafkaSettings.parse(dict(SinkUri.parse(given).options))
    assert expected == (
        settings.protocol,
        settings.partitions,
        settings.creates_topic,
        settings.has_schema,
        settings.is_extended,
    )


def test_a_cut_may_take_as_long_as_the_uri_says():
    given = "kafka://k/t?protocol=canal-json"
    longer = SinkUri.parse(f"{given}&transaction-timeout-ms=3600000")
    found = [KafkaSettings.parse(dict(uri.options)) for uri in (SinkUri.parse(given), longer)]
    assert [settings.transaction_timeout_ms for settings in found] == [600_000, 3_600_000]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("kafka://k/t", "protocol is missing: canal-json"),
        ("kafka://k/t?protocol=avro", "protocol is one of canal-json"),
        ("kafka:///t?protocol=canal-json", "needs its brokers"),
        ("kafka://k:0/t?protocol=canal-json", "needs its brokers"),
        ("kafka://k,/t?protocol=canal-json", "needs its brokers"),
        ("kafka://k/?protocol=canal-json", "cannot be a topic"),
        ("kafka://k/a/b?protocol=canal-json", "cannot be a topic"),
        ("kafka://k/..?protocol=canal-json", "cannot be a topic"),
        ("kafka://alice@k/t?protocol=canal-json", "sasl-user=NAME"),
        ("kafka://alice:secret@k/t?protocol=canal-json", "password-file"),
        ("kafka://k/t?protocol=canal-json&sasl-password=secret", "password-file"),
        ("kafka://k/t?protocol=canal-json&sasl-user=alice", "belong together"),
        (f"kafka://k/t?protocol=canal-json&{LOGIN.replace('SCRAM', 'OAUTH')}", "sasl-mechanism is"),
        ("kafka://k/t?protocol=canal-json&ca=/ca.pem", "enable-tls=true"),
        ("kafka://k/t?protocol=canal-json&enable-tls=true&cert=/c.pem", "cert and key"),
        ("kafka://k/t?protocol=canal-json&kafka-version=2.4.0", "leave out kafka-version"),
        ("kafka://k/t?protocol=canal-json&required-acks=1", "leave out required-acks"),
        ("kafka://k/t?protocol=canal-json&partition-num=0", "partition-num is a whole number"),
        ("kafka://k/t?protocol=canal-json&compact-every=8", "no option 'compact-every'"),
        ("kafka://k/t?protocol=canal-json&mode=upsert", "can do append"),
        ("kafka://k/t?protocol=canal-json&schema-evolution=ignore", "columns of their row"),
        ("kafka://k/t?protocol=canal-json&password-env=HOME&sasl-user=a", "belong together"),
        (f"kafka://k/t?protocol=canal-json&{LOGIN}X&password-file=/p", "two ways"),
        (f"kafka://127.0.0.1,k/t?protocol=canal-json&{CLEAR}", "add enable-tls=true"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(given, advice):
    with pytest.raises(SourceError) as raised:
        SinkUri.parse(given)
    assert raised.value.code == "ErrTargetInvalid"
    assert advice in raised.value.message
    assert "secret" not in str(raised.value).replace("TIDEMARK_SECRET", "")
    assert "secret" not in redacted(given).replace("TIDEMARK_SECRET", "")


@pytest.mark.parametrize(
    "given",
    [
        "kafka://127.0.0.1:9092,localhost,[::1]:1/t?protocol=canal-json",
        "kafka://k/t?protocol=canal-json&enable-tls=true",
    ],
)
def test_a_password_may_go_as_it_is_by_tls_and_inside_of_a_machine(given):
    assert SinkUri.parse(f"{given}&{CLEAR}").option("sasl-user") == "alice"


def test_a_login_goes_into_the_clients_configuration_quoted(monkeypatch):
    monkeypatch.setenv("TIDEMARK_SECRET_KAFKA", 'pa"ss\\word')
    uri = SinkUri.parse(f"kafka://k/t?protocol=canal-json&enable-tls=true&{LOGIN}")
    settings = _connection(uri)
    assert settings["security.protocol"] == "SASL_SSL"
    assert settings["sasl.mechanism"] == "SCRAM-SHA-512"
    assert settings["sasl.jaas.config"] == (
        "org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="alice" password="pa\\"ss\\\\word";'
    )


def test_certificates_are_read_from_their_files(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"PEM of {name}")
    files = "&".join(f"{name}={tmp_path / name}" for name in ("ca", "cert", "key"))
    uri = SinkUri.parse(f"kafka://k/t?protocol=canal-json&enable-tls=true&{files}")
    settings = _connection(uri)
    assert settings["security.protocol"] == "SSL"
    assert settings["ssl.truststore.certificates"] == "PEM of ca"
    assert settings["ssl.keystore.key"] == "PEM of key"
    (tmp_path / "key").unlink()
    with pytest.raises(SourceError, match=r"ErrCredentials.*cannot read .*/key"):
        _connection(uri)
