"""The JVM's names are made here, and its collections are not iterated over by py4j."""

from types import SimpleNamespace

import pytest
from py4j.java_gateway import JavaClass
from pyspark_tidemark.jvm import JavaPackage, java_dict, java_items


class Client:
    """A connection on which nothing may be asked."""

    gateway_property = SimpleNamespace(pool=None)
    converters = ()

    def send_command(self, command):
        raise AssertionError(f"the JVM was asked: {command}")


def test_a_class_is_named_without_a_question():
    classes = JavaPackage(Client())
    found = classes.org.apache.hadoop.fs.Path
    assert isinstance(found, JavaClass)
    assert found._fqn == "org.apache.hadoop.fs.Path"
    assert classes.org.apache.hadoop.fs.Path is found
    assert classes.java.util.ArrayList._fqn == "java.util.ArrayList"


def test_private_names_are_no_packages():
    with pytest.raises(AttributeError):
        _ = JavaPackage(Client())._nothing


class Collection:
    """A Java collection whose iterator hides an error, as py4j's do."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return iter(())

    def toArray(self):
        return self._items


def test_all_items_are_read_and_not_by_an_iterator():
    assert java_items(Collection([3, 1])) == [3, 1]


def test_a_map_is_read_by_its_keys():
    class Map:
        def keySet(self):
            return Collection(["a", "b"])

        def get(self, key):
            return key.upper()

    assert java_dict(Map()) == {"a": "A", "b": "B"}
