"""Kafka as a target: every change of every table of a changefeed as messages of one topic, each cut
in one transaction of Kafka.

Invariants:
1. A topic has one writer: its producer's transactional id is the topic's name, so a job that starts
   fences whoever wrote before (`topic`).
2. All messages of a cut, and the marker that ends it in each partition, are one transaction:
   consumers with `isolation.level=read_committed` see whole cuts, and each once (`manifest`).
3. The newest marker is the manifest: it is committed with its cut or not at all, so whoever starts
   reads the end of a partition and knows up to where the topic is.
4. A key's messages are in one partition, in commit order.

From the target down: `target`, `manifest`, `topic` (the transaction, the end of the topic),
`sender` (many rows for one call of the JVM), `client` (Kafka's clients, their settings and their
errors), `messages` with its encoders `canal` and `debezium`, `settings` (the options of the URI).
Design: docs/design/0034-kafka.md. This module has the record of the format. Pure, so that daemons
read it without Spark.
"""

from typing import Final

from pyspark_tidemark.lake.format import APPEND, Jars, LakeFormat

_JAR: Final = "org.apache.kafka_kafka-clients-4.1.1.jar"

KAFKA: Final = LakeFormat(
    name="kafka",
    title="Kafka",
    modes=(APPEND,),
    entry_point="pyspark_tidemark.lake.kafka.target:KafkaTarget",
    is_topic=True,
    # Spark's own sink for Kafka has no transactions, so the client is all that is needed.
    # Compression (lz4, snappy, zstd) is among Spark's own jars.
    jars=Jars(
        "org.apache.kafka:kafka-clients:4.1.1",
        {_JAR: "00247122a572c3d3ae4eb60a50192a5811bc0181f51923d13018600f892e821d"},
    ),
)
