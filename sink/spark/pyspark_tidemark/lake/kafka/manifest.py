"""The cuts of a changefeed in its topic: the newest marker says up to where it is.

A cut is one transaction, so there is nothing to keep beside it: no table is ahead of another, and a
cut that was begun and not committed has never been there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord, Shown, shown_by
from pyspark_tidemark.lake.kafka.canal import CanalJson
from pyspark_tidemark.lake.kafka.client import Clients
from pyspark_tidemark.lake.kafka.debezium import DebeziumJson
from pyspark_tidemark.lake.kafka.messages import Encoder, Marker
from pyspark_tidemark.lake.kafka.settings import CANAL_JSON, KafkaSettings
from pyspark_tidemark.lake.kafka.topic import Topic, now_ms
from pyspark_tidemark.lake.manifest import WHOLE_CUTS, check_follows
from pyspark_tidemark.sink_uri import SinkUri


class KafkaManifest:
    """Implements `lake.manifest.Manifest`."""

    commits = WHOLE_CUTS

    def __init__(self, topic: Topic, encoder: Encoder, last: CutRecord | None) -> None:
        self.topic = topic
        self.encoder = encoder
        self.last = last

    @classmethod
    @contextmanager
    def opened(
        cls, spark: SparkSession, uri: SinkUri, changefeed: str
    ) -> Iterator["KafkaManifest"]:
        """The manifest of a topic for the block, in which only this job may write to the topic.

        Raises:
            SourceError: ErrTargetForeign, ErrTargetUnusable, ErrTargetUnavailable, ErrCredentials.
        """
        clients = Clients(spark, uri)
        topic = Topic(clients)
        encoder = _encoder(clients.settings, changefeed)
        if topic.is_compacted and encoder.watermark(0, 0) is None:
            raise SourceError(
                "ErrTargetUnusable",
                f"the topic {uri.path} is compacted (cleanup.policy=compact), which removes messages "
                "without a value, as the markers of cuts are: add enable-tidb-extension=true to the "
                "sink URI, or cleanup.policy=delete to the topic",
            )
        # Before the takeover, which stops the job that writes: that of another changefeed goes on.
        _own_cut(topic.newest_marker(), changefeed, uri)
        try:
            topic.take()
            # Read after it: until then the predecessor could commit one more cut.
            yield cls(topic, encoder, _own_cut(topic.newest_marker(), changefeed, uri))
        finally:
            topic.close()

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:  # noqa: ARG002 - nobody else begins
        """See `Manifest`; the transaction begins."""
        self.topic.begin()
        return end_ts

    def commit(self, record: CutRecord) -> None:
        """See `Manifest`; the transaction ends."""
        check_follows(self.last, record)
        self.topic.commit(record, self.encoder.watermark(record.end_ts, now_ms()))
        self.last = record

    def note_moved(self, ts: int) -> None:
        """Do nothing: a topic has no tables that could change places."""

    def moved_at(self, ts: int) -> bool:
        """Never."""
        del ts
        return False

    def cuts(self) -> list[CutRecord]:
        """The newest one only: a log is read from where its consumer is."""
        return [] if self.last is None else [self.last]

    def each_cut(self) -> Iterator[CutRecord]:
        """See `Manifest`."""
        yield from self.cuts()

    def shown(self) -> dict[str, Shown]:
        """See `Manifest`."""
        return shown_by(self.cuts())

    def tidy(self, horizon: datetime) -> None:
        """Do nothing: the brokers remove what is old, as the topic's settings say."""


def _encoder(settings: KafkaSettings, changefeed: str) -> Encoder:
    if settings.protocol == CANAL_JSON:
        return CanalJson(extended=settings.is_extended)
    return DebeziumJson(changefeed, with_schema=settings.has_schema, extended=settings.is_extended)


def _own_cut(marker: Marker | None, changefeed: str, uri: SinkUri) -> CutRecord | None:
    """The cut of a marker, which must be of this changefeed."""
    if marker is None:
        return None
    if marker.cut.changefeed != changefeed:
        raise SourceError(
            "ErrTargetForeign",
            f"the topic {uri.path} is that of changefeed {marker.cut.changefeed!r}; choose another "
            "topic",
        )
    return marker.cut
