"""The JVM's classes and collections, with few calls: each one costs some tenths of a millisecond.

py4j's own view asks for `org.apache.hadoop.fs.Path` five times whether there is a class of that
name: `org`, `org.apache` and so on. Each time the answer is no, the JVM has looked into every jar:
that was a third of what a small cut cost. Java's conventions say the same: packages begin with a
small letter, classes with a capital.
"""

from typing import Any

from py4j.java_collections import JavaList
from py4j.java_gateway import JavaClass
from pyspark.sql import SparkSession


class JavaPackage:
    """A package; its attributes are packages and classes, such as
    `java_classes(spark).java.util.ArrayList`.
    """

    def __init__(self, client: Any, name: str = "") -> None:
        self._client = client
        self._prefix = f"{name}." if name else ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        full = self._prefix + name
        is_class = name[0].isupper()
        named = JavaClass(full, self._client) if is_class else JavaPackage(self._client, full)
        setattr(self, name, named)  # the next time it is there
        return named


def java_classes(spark: SparkSession) -> JavaPackage:
    """The classes of a session's JVM; one that is not there is an error at its first use."""
    return JavaPackage(spark.sparkContext._gateway._gateway_client)  # type: ignore[union-attr]  # noqa: SLF001 - PySpark has no call for other classes


def java_int(spark: SparkSession) -> Any:
    """Java's primitive type, for arrays of it."""
    return JavaClass("int", spark.sparkContext._gateway._gateway_client)  # type: ignore[union-attr]  # noqa: SLF001 - see above


def java_items(collection: Any) -> list[Any]:
    """The items of a Java collection.

    Not by iterating over it: py4j's iterators take every exception for the end, and the one that
    does end them costs PySpark fifteen calls to find out what it is.
    """
    if isinstance(collection, JavaList):
        return [collection.get(at) for at in range(len(collection))]
    array = collection.toArray()
    return [array[at] for at in range(len(array))]


def java_dict(mapping: Any) -> dict[Any, Any]:
    """The keys and values of a Java map."""
    return {key: mapping.get(key) for key in java_items(mapping.keySet())}
