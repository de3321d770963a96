"""One topic and its only writer: the topic is created if it does not exist, its newest marker is
read, and one transaction is written after the other.

Taking a topic over ends the transaction of another job, which can write no more. So the topic is
checked before that, too: a job that may not write there must not stop one that may.
"""

import threading
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from py4j.protocol import Py4JError, Py4JJavaError

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.kafka.client import (
    Clients,
    is_fenced,
    kafka_errors,
    taken_over,
    transactional_id,
)
from pyspark_tidemark.lake.kafka.messages import (
    MARKER_HEADER,
    MARKER_KEY,
    Marker,
    Message,
    Messages,
)
from pyspark_tidemark.lake.kafka.sender import Sender
from pyspark_tidemark.lake.kafka.settings import PARTITIONS

_SEARCH_OFFSETS: Final = 100
_SEARCH_GROWTH: Final = 16
_FOREIGN_MAX: Final = 1000
"""How many messages of other producers may follow the newest marker."""
_DECIDED_WAIT_S, _DECIDED_STEP_S = 60.0, 0.1
_POLL_MS: Final = 1000
_MARKER_BYTES_MAX: Final = 256 << 10
"""The size of a marker's document that names the tables of its cut, in each partition."""
_OVERHEAD_BYTES: Final = 256
"""The size of a message without its key and its value, at most."""


class Topic:
    """The topic of a sink URI; `take` it, then `begin`, `send` and `commit` as often as needed."""

    def __init__(self, clients: Clients) -> None:
        """Create the topic if it does not exist.

        Raises:
            SourceError: ErrTargetUnusable, ErrCredentials, ErrTargetUnavailable.
        """
        self._clients = clients
        self._uri = clients.uri
        self._counts_lock = threading.Lock()
        self._counts: list[int] = []
        self._is_open = False
        self._producer: Any = None
        self._sender: Sender | None = None
        with kafka_errors(self._uri):
            admin = clients.admin()
            try:
                self.partitions = self._ensure_topic(admin)
                self.is_compacted, topic_limit_bytes = self._topic_settings(admin)
            finally:
                admin.close()
        limit_bytes = clients.settings.max_message_bytes
        self.max_message_bytes = (
            min(limit_bytes, topic_limit_bytes or limit_bytes) - _OVERHEAD_BYTES
        )
        """Of key and value of one message, together."""

    def newest_marker(self) -> Marker | None:
        """The marker of the newest cut that is committed; None if the topic has no messages.

        Raises:
            SourceError: ErrTargetForeign, the messages are somebody else's; ErrTargetUnavailable;
                ErrManifestCorrupt.
        """
        with kafka_errors(self._uri):
            consumer = self._clients.consumer()
            try:
                return self._search_back(consumer)
            finally:
                consumer.close()

    def take(self) -> None:
        """Take the topic over: another job's open transaction is aborted, and it can write no more.

        Raises:
            SourceError: ErrCredentials, ErrTargetUnavailable.
        """
        with kafka_errors(self._uri):
            self._close_predecessor()
            self._producer = self._clients.producer(transactional_id(self._uri))
            self._properties().put(self._producer_property(), self._producer)
            self._producer.initTransactions()
            self._sender = Sender(
                self._clients.classes, self._producer, self._uri.path, self.partitions
            )
            self._await_open_transactions()

    def begin(self) -> None:
        """Begin a transaction, unless one is open."""
        if self._is_open:
            return
        with kafka_errors(self._uri):
            self._producer.beginTransaction()
        self._is_open, self._counts = True, [0] * self.partitions

    def send(self, messages: Messages) -> None:
        """Send rows' messages in the open transaction; any number of threads may.

        Raises:
            SourceError: ErrTargetBusy, ErrTargetUnavailable, ErrMessageTooLarge.
        """
        assert self._sender is not None
        with kafka_errors(self._uri):
            try:
                counts = self._sender.send_all(messages)
            except Py4JJavaError as err:
                self._raise_transaction_ended(err)
        with self._counts_lock:
            self._counts = [one + more for one, more in zip(self._counts, counts, strict=True)]

    def send_statement(self, message: Message, *, to_all: bool) -> None:
        """Send a DDL's message to the first partition or to all."""
        assert self._sender is not None
        for partition in range(self.partitions if to_all else 1):
            with kafka_errors(self._uri):
                self._sender.send_one(partition, message.key, message.value, None)
            with self._counts_lock:
                self._counts[partition] += 1

    def commit(self, record: CutRecord, watermark: bytes | None) -> None:
        """End each partition with the marker of a cut, and commit; durable when it returns.

        Raises:
            SourceError: ErrTargetBusy, another job has taken the topic over; ErrTargetUnavailable,
                whether it is committed will be known to the next job.
        """
        assert self._sender is not None
        most_bytes = min(
            _MARKER_BYTES_MAX, self.max_message_bytes - len(MARKER_KEY) - len(watermark or b"")
        )
        document = Marker(record, tuple(self._counts)).within(most_bytes).to_json().encode()
        with kafka_errors(self._uri):
            try:
                for partition in range(self.partitions):
                    self._sender.send_one(
                        partition, MARKER_KEY, watermark, (MARKER_HEADER, document)
                    )
                self._producer.commitTransaction()
            except Py4JJavaError as err:
                self._raise_transaction_ended(err)
        self._is_open = False

    def close(self) -> None:
        """Abort an open transaction and close the producer; also after an error."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        # Where the brokers or the JVM are gone, the next job's takeover ends the transaction.
        with suppress(Py4JError):
            if self._is_open:
                producer.abortTransaction()
        with suppress(Py4JError):
            self._properties().remove(self._producer_property())
            producer.close(self._duration(0))

    def _raise_transaction_ended(self, err: Py4JJavaError) -> NoReturn:
        """Raise the error for a transaction that failed.

        Brokers end a transaction that is open for too long by the same error as that of a job which
        was taken over. A producer that is allowed to abort it was not taken over.
        """
        if not is_fenced(err):
            raise err
        self._is_open = False
        try:
            self._producer.abortTransaction()
        except Py4JJavaError as again:
            if is_fenced(again):
                raise taken_over(self._uri) from None
            raise
        raise SourceError(
            "ErrTargetUnavailable",
            "the brokers have ended the transaction of the cut, which was open for longer than "
            f"{self._clients.settings.transaction_timeout_ms} ms: too long. The cut is written again; "
            "if that stays, raise transaction-timeout-ms in the sink URI (and "
            "transaction.max.timeout.ms of the brokers, above 15 minutes), or have smaller cuts by "
            "--max-rows-per-trigger",
            retryable=True,
        )

    def _ensure_topic(self, admin: Any) -> int:
        """Create the topic if it does not exist; returns how many partitions the job writes."""
        settings = self._clients.settings
        existing = self._existing_partitions(admin)
        if existing is None:
            if not settings.creates_topic:
                raise SourceError(
                    "ErrTargetUnusable",
                    f"there is no topic {self._uri.path}, and auto-create-topic is false: create it",
                )
            self._create(admin)
            return settings.partitions or PARTITIONS
        if settings.partitions is not None and settings.partitions > existing:
            raise SourceError(
                "ErrTargetUnusable",
                f"the topic {self._uri.path} has {existing} partitions, fewer than partition-num "
                f"({settings.partitions}): leave it out, or add partitions",
            )
        return settings.partitions or existing

    def _existing_partitions(self, admin: Any) -> int | None:
        try:
            described = admin.describeTopics(self._list(self._uri.path)).allTopicNames().get()
        except Py4JJavaError as err:
            if "UnknownTopicOrPartitionException" in str(err.java_exception):
                return None
            raise
        return len(described.get(self._uri.path).partitions())

    def _create(self, admin: Any) -> None:
        settings, optional = self._clients.settings, self._clients.classes.java.util.Optional
        topics = self._clients.classes.org.apache.kafka.clients.admin.NewTopic
        count = settings.partitions or PARTITIONS
        topic = (
            topics(self._uri.path, optional.of(count), optional.empty())
            if settings.replicas is None
            else topics(self._uri.path, count, settings.replicas)
        )
        try:
            admin.createTopics(self._list(topic)).all().get()
        except Py4JJavaError as err:
            if "TopicExistsException" not in str(err.java_exception):
                raise

    def _topic_settings(self, admin: Any) -> tuple[bool, int | None]:
        """Whether the topic keeps only the newest message of a key, and how many bytes a message
        may have (None: the brokers do not say).
        """
        classes = self._clients.classes.org.apache.kafka.common.config.ConfigResource
        kinds = {str(kind.name()): kind for kind in _java_array(classes.Type.values())}
        resource = classes(kinds["TOPIC"], self._uri.path)
        try:
            described = admin.describeConfigs(self._list(resource)).all().get().get(resource)
        except Py4JJavaError as err:
            if "AuthorizationException" in str(err.java_exception):
                return False, None
            if "UnknownTopicOrPartitionException" in str(err.java_exception):
                # It was created a moment ago, and not every broker has it yet.
                return False, None
            raise
        policy = str(described.get("cleanup.policy").value())
        return policy == "compact", int(described.get("max.message.bytes").value())

    def _search_back(self, consumer: Any) -> Marker | None:
        partition = self._first_partition()
        assigned = self._list(partition)
        consumer.assign(assigned)
        begin = int(consumer.beginningOffsets(assigned).get(partition))
        end = int(consumer.endOffsets(assigned).get(partition))
        window = _SEARCH_OFFSETS
        # Aborted messages have offsets, too, and are not read: so each search begins farther back.
        while begin < end:
            start = max(begin, end - window)
            seen, marker = self._newest_marker_between(consumer, partition, start, end)
            if marker is not None:
                return marker
            if seen > _FOREIGN_MAX or (seen and start == begin):
                raise SourceError(
                    "ErrTargetForeign",
                    f"the topic {self._uri.path} has messages that no changefeed of Tidemark wrote; "
                    "each changefeed needs a topic of its own",
                )
            if start == begin:
                break
            window *= _SEARCH_GROWTH
        return None

    def _newest_marker_between(
        self, consumer: Any, partition: Any, start: int, end: int
    ) -> tuple[int, Marker | None]:
        """How many messages there are in offsets `[start, end)`, and the newest marker of these."""
        consumer.seek(partition, start)
        seen, newest = 0, None
        deadline = time.monotonic() + _DECIDED_WAIT_S
        while int(consumer.position(partition)) < end:
            messages = consumer.poll(self._duration(_POLL_MS)).records(partition)
            count = len(messages)
            seen += count
            if not count and time.monotonic() > deadline:
                raise SourceError(
                    "ErrTargetUnavailable",
                    f"the end of the topic {self._uri.path} cannot be read",
                    retryable=True,
                )
            for at in range(count - 1, max(-1, count - 1 - _FOREIGN_MAX), -1):
                if (marker := _marker(messages.get(at))) is not None:
                    newest = marker
                    break
        return seen, newest

    def _await_open_transactions(self) -> None:
        """Wait until every transaction in the first partition is committed or aborted.

        Else the newest marker could be hidden behind another producer's open transaction.
        """
        admin = self._clients.admin()
        try:
            end = self._end_offset(admin, "READ_UNCOMMITTED")
            deadline = time.monotonic() + _DECIDED_WAIT_S
            while self._end_offset(admin, "READ_COMMITTED") < end:
                if time.monotonic() > deadline:
                    raise SourceError(
                        "ErrTargetUnavailable",
                        f"a producer other than Tidemark's has a transaction open in the topic "
                        f"{self._uri.path}; each changefeed needs a topic of its own",
                        retryable=True,
                    )
                time.sleep(_DECIDED_STEP_S)
        finally:
            admin.close()

    def _end_offset(self, admin: Any, isolation: str) -> int:
        kafka = self._clients.classes.org.apache.kafka
        offsets = self._clients.classes.java.util.HashMap()
        partition = self._first_partition()
        offsets.put(partition, kafka.clients.admin.OffsetSpec.latest())
        level = kafka.common.IsolationLevel.valueOf(isolation)
        options = kafka.clients.admin.ListOffsetsOptions(level)
        return int(admin.listOffsets(offsets, options).partitionResult(partition).get().offset())

    def _first_partition(self) -> Any:
        return self._clients.classes.org.apache.kafka.common.TopicPartition(self._uri.path, 0)

    def _list(self, *items: Any) -> Any:
        listed = self._clients.classes.java.util.ArrayList()
        for item in items:
            listed.add(item)
        return listed

    def _duration(self, ms: int) -> Any:
        return self._clients.classes.java.time.Duration.ofMillis(ms)

    def _properties(self) -> Any:
        return self._clients.classes.java.lang.System.getProperties()

    def _producer_property(self) -> str:
        return f"tidemark.kafka.{self._uri.host}/{self._uri.path}"

    def _close_predecessor(self) -> None:
        """Close the producer of a job that died while its JVM runs on with other jobs."""
        # The producer is kept in the JVM's system properties, which hold any object.
        predecessor = self._properties().get(self._producer_property())
        if predecessor is not None:
            predecessor.close(self._duration(0))


def now_ms() -> int:
    """The time of now, for the messages that are made."""
    return int(time.time() * 1000)


def _java_array(array: Any) -> list[Any]:
    return [array[at] for at in range(len(array))]


def _marker(message: Any) -> Marker | None:
    key = message.key()
    if key is None or bytes(key) != MARKER_KEY:
        return None
    headers = [each for each in _headers(message) if str(each.key()) == MARKER_HEADER]
    return Marker.from_json(bytes(headers[0].value()).decode()) if headers else None


def _headers(message: Any) -> list[Any]:
    """The headers of a message."""
    return _java_array(message.headers().toArray())
