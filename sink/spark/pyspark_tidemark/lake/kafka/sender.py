"""Hands many messages to Kafka's producer by one call of the JVM: a call for each would be a few
thousand messages a second, whatever Kafka can do.

The class is compiled when the job starts, by the compiler that Spark itself brings for the code of
its plans (Janino), so no jar of ours has to be built or installed.
"""

from typing import Any, Final

import numpy as np

from pyspark_tidemark.lake.kafka.messages import Messages

_NAME: Final = "TidemarkSender"
_SOURCE: Final = (
    """
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.IntBuffer;
import java.util.Arrays;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.utils.Utils;

public class """
    + _NAME
    + """ {
  private final Producer producer;
  private final String topic;
  private final int partitions;

  public TidemarkSender(Object producer, String topic, int partitions) {
    this.producer = (Producer) producer;
    this.topic = topic;
    this.partitions = partitions;
  }

  /** Each message to the partition of its key, which is the one that Kafka's own partitioner gives. */
  public String sendAll(
      byte[] keys, byte[] keyPlaces, byte[] keyEnd,
      byte[] values, byte[] valuePlaces, byte[] valueEnd) {
    IntBuffer key = places(keyPlaces);
    IntBuffer value = places(valuePlaces);
    int[] counts = new int[partitions];
    for (int i = 0; i + 1 < key.limit(); i++) {
      byte[] keyBytes = joined(keys, key.get(i), key.get(i + 1), keyEnd);
      byte[] valueBytes = joined(values, value.get(i), value.get(i + 1), valueEnd);
      int partition = Utils.toPositive(Utils.murmur2(keyBytes)) % partitions;
      producer.send(new ProducerRecord(topic, Integer.valueOf(partition), keyBytes, valueBytes));
      counts[partition]++;
    }
    return Arrays.toString(counts);
  }

  /** One message to a partition; value and header may be null. */
  public void sendOne(int partition, byte[] key, byte[] value, String header, byte[] document) {
    ProducerRecord record =
        new ProducerRecord(topic, Integer.valueOf(partition), key, value);
    if (header != null) {
      record.headers().add(header, document);
    }
    producer.send(record);
  }

  private static byte[] joined(byte[] texts, int begin, int end, byte[] tail) {
    byte[] whole = Arrays.copyOfRange(texts, begin, end + tail.length);
    System.arraycopy(tail, 0, whole, end - begin, tail.length);
    return whole;
  }

  private static IntBuffer places(byte[] bytes) {
    return ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer();
  }
}
"""
)


class Sender:
    """Sends to one topic by one producer; any number of threads may."""

    def __init__(self, classes: Any, producer: Any, topic: str, partitions: int) -> None:
        constructor = _compiled(classes, producer.getClass().getClassLoader()).getConstructors()[0]
        arguments = classes.java.util.ArrayList()
        for argument in (producer, topic, partitions):
            arguments.add(argument)
        self._java = constructor.newInstance(arguments.toArray())

    def send_all(self, messages: Messages) -> list[int]:
        """Send messages, each to the partition of its key; returns how many went to each."""
        counts = self._java.sendAll(
            *_buffers(messages.keys),
            messages.key_end.encode(),
            *_buffers(messages.values),
            messages.value_end.encode(),
        )
        return [int(count) for count in counts[1:-1].split(",")]

    def send_one(
        self, partition: int, key: bytes, value: bytes | None, header: tuple[str, bytes] | None
    ) -> None:
        """Send one message to a partition."""
        name, document = (None, None) if header is None else header
        self._java.sendOne(partition, key, value, name, document)


def _compiled(classes: Any, loader: Any) -> Any:
    """The class, by the loader that has Kafka's, wherever Spark put the jar; once in each JVM."""
    # Py4J remembers methods by the name of their class, so there must be one class of a name: jobs
    # that share a JVM find it among the JVM's properties.
    properties = classes.java.lang.System.getProperties()
    place = f"tidemark.kafka.{_NAME}"
    if properties.get(place) is None:
        compiler = classes.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(_SOURCE)
        properties.putIfAbsent(place, compiler.getClassLoader().loadClass(_NAME))
    return properties.get(place)


def _buffers(texts: Any) -> tuple[bytes, bytes]:
    """The bytes of all texts, and where each of them begins and ends."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    data = texts.buffers()[2]
    content = b"" if data is None else bytes(memoryview(data)[offsets[0] : offsets[-1]])
    return content, (offsets - offsets[0]).astype("<i4").tobytes()
