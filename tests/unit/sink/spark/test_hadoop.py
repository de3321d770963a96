"""Directories behind Hadoop's file systems: a refusal without an exception is one."""

from types import SimpleNamespace

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import hadoop


class Path:
    """A path as Java has it."""

    def __init__(self, text):
        self.text = text

    def toString(self):
        return self.text

    def getParent(self):
        return SimpleNamespace(toString=lambda: self.text.rpartition("/")[0])

    def getName(self):
        return self.text.rpartition("/")[2]


class Refusing:
    """A file system that says no by `false`, as HDFS does in places."""

    def exists(self, path):
        return path.text.endswith("/old")

    def mkdirs(self, path):
        return True

    def delete(self, path, recursive):
        return True

    def rename(self, old, new):
        return False


@pytest.fixture(autouse=True)
def refusing(monkeypatch):
    monkeypatch.setattr(hadoop, "_hadoop_path", lambda _, path: Path(path))
    monkeypatch.setattr(hadoop, "_system", lambda *_: Refusing())


@pytest.mark.parametrize(
    "step",
    [
        lambda: hadoop.move(None, "hdfs://nn/lake/a/old", "hdfs://nn/lake/a/new"),
        lambda: hadoop.remove(None, "hdfs://nn/lake/a/old"),
    ],
    ids=["move", "remove"],
)
def test_a_directory_that_was_not_renamed_is_an_error(step):
    """The job went on, and began the table of the new name without its rows."""
    with pytest.raises(
        SourceError, match=r"ErrTargetUnavailable.*/a/old cannot be renamed"
    ) as caught:
        step()
    assert caught.value.retryable
