"""Which class archive a JVM is told to use."""

from pathlib import Path

import pytest
from pyspark_tidemark.java import archive_path, java_options

JARS = (Path("/jars/a.jar"), Path("/jars/b.jar"))


@pytest.fixture(autouse=True)
def java(tmp_path, monkeypatch):
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    return program


def test_without_an_archive_java_is_told_nothing(tmp_path):
    assert java_options(tmp_path, JARS) == ""


def test_an_archive_is_used_by_the_java_and_the_class_path_it_was_made_for(tmp_path, java):
    archive_path(tmp_path, JARS).touch()
    assert f"-XX:SharedArchiveFile={archive_path(tmp_path, JARS)} " in java_options(tmp_path, JARS)
    assert java_options(tmp_path, JARS[:1]) == "", "another class path"
    assert java_options(tmp_path, JARS[::-1]) == "", "the same jars in another order"
    java.unlink()
    assert java_options(tmp_path, JARS) == "", "another Java"
