"""All messages of a topic, as a consumer gets them that reads what is committed."""

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.kafka.messages import MARKER_HEADER, MARKER_KEY, Marker

_SOURCE = """
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.common.*;

public class TopicReader {
  // A commit is told before every partition has it: `all` sees what is decided on or not.
  private static Map ends(Consumer consumer, Consumer all, List parts) throws Exception {
    Map latest = all.endOffsets(parts);
    for (int i = 0; i < 100 && !latest.equals(consumer.endOffsets(parts)); i++) {
      Thread.sleep(20);
    }
    all.close();
    return consumer.endOffsets(parts);
  }

  public static String readAll(Object given, Object all, String topic) throws Exception {
    Consumer consumer = (Consumer) given;
    List parts = new ArrayList();
    for (Iterator it = consumer.partitionsFor(topic).iterator(); it.hasNext();) {
      parts.add(new TopicPartition(topic, ((PartitionInfo) it.next()).partition()));
    }
    if (parts.isEmpty()) {
      consumer.close();
      ((Consumer) all).close();
      return "";
    }
    consumer.assign(parts);
    consumer.seekToBeginning(parts);
    Map ends = ends(consumer, (Consumer) all, parts);
    StringBuilder out = new StringBuilder();
    for (boolean more = true; more;) {
      ConsumerRecords polled = consumer.poll(Duration.ofMillis(200));
      for (Iterator it = polled.iterator(); it.hasNext();) {
        ConsumerRecord record = (ConsumerRecord) it.next();
        out.append(record.partition()).append('\\t').append(record.offset()).append('\\t');
        out.append(text((byte[]) record.key())).append('\\t');
        out.append(text((byte[]) record.value())).append('\\t');
        org.apache.kafka.common.header.Header header = record.headers().lastHeader("tidemark");
        out.append(header == null ? "-" : text(header.value())).append('\\n');
      }
      more = false;
      for (Iterator it = parts.iterator(); it.hasNext();) {
        TopicPartition part = (TopicPartition) it.next();
        more |= consumer.position(part) < ((Long) ends.get(part)).longValue();
      }
    }
    consumer.close();
    return out.toString();
  }

  private static String text(byte[] bytes) {
    return bytes == null ? "-" : Base64.getEncoder().encodeToString(bytes);
  }
}
"""


@dataclasses.dataclass(frozen=True)
class Received:
    """One message."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    header: bytes | None

    @property
    def marker(self) -> Marker | None:
        """What it says of a cut, if it ends one."""
        if self.key != MARKER_KEY or self.header is None:
            return None
        return Marker.from_json(self.header.decode())

    @property
    def document(self) -> Any:
        """The JSON of its value."""
        assert self.value is not None
        return json.loads(self.value)


def received(
    spark: SparkSession, address: str, topic: str, isolation: str = "read_committed"
) -> list[Received]:
    """Everything in a topic, a partition's messages in order."""
    assert MARKER_HEADER == "tidemark"
    classes: Any = java_classes(spark)
    settings = classes.java.util.HashMap()
    bytes_of = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    for name, value in {
        "bootstrap.servers": address,
        "key.deserializer": bytes_of,
        "value.deserializer": bytes_of,
    }.items():
        settings.put(name, value)
    consumers = []
    for level in (isolation, "read_uncommitted"):
        settings.put("isolation.level", level)
        consumers.append(classes.org.apache.kafka.clients.consumer.KafkaConsumer(settings))
    consumer, everything = consumers
    reader = _compiled(classes, consumer.getClass().getClassLoader()).getConstructors()[0]
    empty = classes.java.util.ArrayList().toArray()
    lines = reader.newInstance(empty).readAll(consumer, everything, topic).splitlines()
    return sorted(map(_received, lines), key=lambda each: (each.partition, each.offset))


def _compiled(classes: Any, loader: Any) -> Any:
    """The reader's class, once in each JVM: Py4J remembers methods by the name of their class."""
    properties = classes.java.lang.System.getProperties()
    if properties.get("tidemark.tests.reader") is None:
        compiler = classes.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(_SOURCE)
        properties.put("tidemark.tests.reader", compiler.getClassLoader().loadClass("TopicReader"))
    return properties.get("tidemark.tests.reader")


def _received(line: str) -> Received:
    partition, offset, *texts = line.split("\t")
    key, value, header = (None if text == "-" else base64.b64decode(text) for text in texts)
    return Received(int(partition), int(offset), key, value, header)


def row_messages(messages: Sequence[Received]) -> list[Received]:
    """Those that are no markers."""
    return [each for each in messages if each.marker is None]
