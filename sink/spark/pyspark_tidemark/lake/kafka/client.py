"""Kafka's Java clients in the driver's JVM: their settings, and their exceptions as errors with a
code.

Secrets go from their file or variable into the clients' own configuration, whose values of type
password Kafka never prints. They are in no setting of Spark, so neither its UI nor its event log
has them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.kafka.settings import TRANSACTION_TIMEOUT_MS, KafkaSettings
from pyspark_tidemark.sink_uri import SinkUri
from pyspark_tidemark.uri_secrets import read_secret

_DELIVERY_TIMEOUT_MS: Final = 180_000
"""How long a cut waits for brokers that are down, before the job ends and is started again."""
_CALL_TIMEOUT_MS: Final = 60_000
_REQUEST_TIMEOUT_MS: Final = 30_000
_BATCH_BYTES: Final = 256 << 10
_BYTES: Final = "org.apache.kafka.common.serialization.ByteArray"
_LOGINS: Final = {
    "plain": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "scram-sha-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "scram-sha-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_ERRORS: Final = "org.apache.kafka.common.errors."
_DENIED: Final = (
    "TopicAuthorizationException",
    "TransactionalIdAuthorizationException",
    "ClusterAuthorizationException",
)
_LOGIN_FAILED: Final = (
    "SaslAuthenticationException",
    "SslAuthenticationException",
    "IllegalSaslStateException",
    "UnsupportedSaslMechanismException",
    # What is in a PEM file is not what its option says.
    "InvalidConfigurationException",
)
_FENCED: Final = ("ProducerFencedException", "InvalidProducerEpochException")
_TOO_LARGE: Final = ("RecordTooLargeException", "RecordBatchTooLargeException")
_CAUSE_CHARACTERS_MAX: Final = 300


class Clients:
    """Makes the clients of one sink URI."""

    def __init__(self, spark: SparkSession, uri: SinkUri) -> None:
        """Raises SourceError: ErrCredentials, a secret or a certificate cannot be read."""
        self.spark = spark
        self.uri = uri
        self.settings = KafkaSettings.parse(dict(uri.options))
        self.classes: Any = java_classes(spark)
        self._shared = _connection(uri) | {
            "client.id": self.settings.client_id or f"tidemark-{uri.path}",
            "request.timeout.ms": str(_REQUEST_TIMEOUT_MS),
        }

    def admin(self) -> Any:
        """An `Admin`; to be closed."""
        return self.classes.org.apache.kafka.clients.admin.Admin.create(
            self._configuration({"default.api.timeout.ms": str(_CALL_TIMEOUT_MS)})
        )

    def producer(self, transactional_id: str) -> Any:
        """A producer with transactions; to be closed."""
        return self.classes.org.apache.kafka.clients.producer.KafkaProducer(
            self._configuration(
                {
                    "transactional.id": transactional_id,
                    "transaction.timeout.ms": str(self.settings.transaction_timeout_ms),
                    "delivery.timeout.ms": str(_DELIVERY_TIMEOUT_MS),
                    "max.block.ms": str(_CALL_TIMEOUT_MS),
                    "max.request.size": str(self.settings.max_message_bytes),
                    "batch.size": str(_BATCH_BYTES),
                    "linger.ms": "5",
                    "compression.type": self.settings.compression,
                    "key.serializer": f"{_BYTES}Serializer",
                    "value.serializer": f"{_BYTES}Serializer",
                }
            )
        )

    def consumer(self) -> Any:
        """A consumer of what is committed, which belongs to no group; to be closed."""
        return self.classes.org.apache.kafka.clients.consumer.KafkaConsumer(
            self._configuration(
                {
                    "isolation.level": "read_committed",
                    "enable.auto.commit": "false",
                    "auto.offset.reset": "none",
                    "default.api.timeout.ms": str(_CALL_TIMEOUT_MS),
                    "max.poll.records": "5000",
                    "key.deserializer": f"{_BYTES}Deserializer",
                    "value.deserializer": f"{_BYTES}Deserializer",
                }
            )
        )

    def _configuration(self, own: dict[str, str]) -> Any:
        configuration = self.classes.java.util.HashMap()
        for name, value in (self._shared | own).items():
            configuration.put(name, value)
        return configuration


@contextmanager
def kafka_errors(uri: SinkUri) -> Iterator[None]:
    """Turn exceptions of Kafka's clients into ours, for the block."""
    try:
        yield
    except Py4JJavaError as err:
        raise _explained(uri, _causes(err.java_exception)) from None
    except PySparkException as err:
        # PySpark has classes of its own for some of Java's.
        raise SourceError("ErrTargetRefused", f"Kafka's client refuses: {err}") from None


def is_fenced(err: Py4JJavaError) -> bool:
    """Whether a transaction was ended by another producer of its id, or by the brokers' clock."""
    return any(name in _FENCED for name, _ in _causes(err.java_exception))


def taken_over(uri: SinkUri) -> SourceError:
    """The error for a job that is no longer the topic's newest."""
    return SourceError(
        "ErrTargetBusy",
        f"another job writes the topic {uri.path} now, and this one has stopped; the newest one "
        "goes on: see that only one is started",
    )


def _connection(uri: SinkUri) -> dict[str, str]:
    options = dict(uri.options)
    is_tls, mechanism = options.get("enable-tls") == "true", options.get("sasl-mechanism", "")
    safe = "SSL" if is_tls else "PLAINTEXT"
    settings = {
        "bootstrap.servers": uri.host,
        "security.protocol": f"SASL_{safe}" if mechanism else safe,
    }
    if "ca" in options:
        settings["ssl.truststore.type"] = "PEM"
        settings["ssl.truststore.certificates"] = _file(options["ca"])
    if "cert" in options:
        settings["ssl.keystore.type"] = "PEM"
        settings["ssl.keystore.certificate.chain"] = _file(options["cert"])
        settings["ssl.keystore.key"] = _file(options["key"])
    if mechanism:
        login, user = _LOGINS[mechanism.lower()], _in_quotes(options["sasl-user"])
        password = _in_quotes(read_secret(options))
        settings["sasl.mechanism"] = mechanism.upper()
        settings["sasl.jaas.config"] = f"{login} required username={user} password={password};"
    return settings


def _file(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as err:
        cause = getattr(err, "strerror", None) or "it is no PEM file"
        raise SourceError("ErrCredentials", f"cannot read {path}: {cause}") from None


def _in_quotes(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _causes(java_exception: Any) -> list[tuple[str, str]]:
    """The exception and its causes, each with the name of its class and its message."""
    causes: list[tuple[str, str]] = []
    while java_exception is not None and len(causes) < 10:
        name = str(java_exception.getClass().getName())
        causes.append((name.rpartition(".")[2], str(java_exception.getMessage())))
        java_exception = java_exception.getCause()
    return causes


def _explained(uri: SinkUri, causes: list[tuple[str, str]]) -> SourceError:
    names = [name for name, _ in causes]
    name, message = causes[-1]
    cause = f"{name}: {message}"[:_CAUSE_CHARACTERS_MAX]
    if any(each in _LOGIN_FAILED for each in names):
        return SourceError(
            "ErrCredentials",
            f"the brokers {uri.host} do not let the job in ({cause}): see sasl-user, "
            "sasl-mechanism and the password that the sink URI names, or ca, cert and key",
        )
    if any(each in _DENIED for each in names):
        return SourceError(
            "ErrCredentials",
            f"the brokers allow too little ({cause}): the job needs Describe, DescribeConfigs, "
            f"Create, Read and Write of the topic {uri.path}, and Describe and Write of the "
            f"transactional id {transactional_id(uri)}",
        )
    if any(each in _FENCED for each in names):
        return taken_over(uri)
    if any(each in _TOO_LARGE for each in names):
        return SourceError(
            "ErrMessageTooLarge",
            f"{cause}: raise max.message.bytes of the topic {uri.path}, and max-message-bytes of "
            "the sink URI",
        )
    if "InvalidTxnTimeoutException" in names:
        return SourceError(
            "ErrTargetUnusable",
            "the brokers take no transaction as long as transaction-timeout-ms of the sink URI says: "
            "raise their transaction.max.timeout.ms, or lower it there (left out, it is "
            f"{TRANSACTION_TIMEOUT_MS})",
        )
    if _is_outage(names) or _is_unresolved(message):
        return SourceError(
            "ErrTargetUnavailable",
            f"the brokers {uri.host} do not answer ({cause}): see that they run, and that this "
            "listener is the one for enable-tls and sasl-mechanism as the sink URI has them",
            retryable=True,
        )
    return SourceError("ErrTargetRefused", f"Kafka refuses: {cause}")


def transactional_id(uri: SinkUri) -> str:
    """The one of all jobs that write a topic, so that a newer one fences an older one."""
    return f"tidemark-{uri.path}"


def _is_outage(names: list[str]) -> bool:
    outages = {
        "TimeoutException",
        "DisconnectException",
        "NetworkException",
        "BrokerNotAvailableException",
        "LeaderNotAvailableException",
        "NotLeaderOrFollowerException",
        "CoordinatorNotAvailableException",
        "CoordinatorLoadInProgressException",
        "NotCoordinatorException",
        "NotEnoughReplicasException",
        "NotEnoughReplicasAfterAppendException",
        "KafkaStorageException",
        "InterruptException",
        "ConcurrentTransactionsException",
        "UnknownTopicOrPartitionException",
    }
    return not outages.isdisjoint(names)


def _is_unresolved(message: str) -> bool:
    """Whether no broker's name has an address now."""
    return "No resolvable bootstrap" in message
