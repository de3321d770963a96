"""Which class archive and which home of Spark a JVM is told to use."""

from pathlib import Path

import pytest
from pyspark_tidemark.java import archive_path, java_options, make_spark_home, spark_home

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


@pytest.fixture
def pyspark(tmp_path, monkeypatch):
    """Spark's directory, as pip installs it."""
    directory = tmp_path / "pyspark"
    (directory / "jars").mkdir(parents=True)
    (directory / "bin").mkdir()
    (directory / "python" / "lib").mkdir(parents=True)
    (directory / "python" / "lib" / "pyspark.zip").touch()
    for jar in ("spark-core_2.13-4.2.1.jar", "spark-mllib_2.13-4.2.1.jar"):
        (directory / "jars" / jar).write_text(jar)
    (directory / "bin" / "spark-submit").touch()
    monkeypatch.setattr("pyspark_tidemark.java._pyspark_directory", lambda: directory)
    return directory


def test_a_spark_home_has_all_but_mllib_and_python(tmp_path, pyspark):
    jars = tmp_path / "jars"
    assert spark_home(jars) is None
    make_spark_home(jars)
    home = spark_home(jars)
    assert [jar.name for jar in (home / "jars").iterdir()] == ["spark-core_2.13-4.2.1.jar"]
    assert (home / "bin" / "spark-submit").is_file()
    assert not (home / "python").exists(), "Python processes would compile what it has"
    assert not (home / "conf").exists()
    (pyspark / "conf").mkdir()
    (pyspark / "conf" / "spark-defaults.conf").touch()
    assert (home / "conf" / "spark-defaults.conf").is_file(), "somebody made it later"
    make_spark_home(jars)
    assert spark_home(jars) == home


def test_a_spark_home_of_jars_that_are_others_now_is_not_used_and_made_anew(tmp_path, pyspark):
    jars = tmp_path / "jars"
    make_spark_home(jars)
    (pyspark / "jars" / "spark-sql_2.13-4.2.1.jar").touch()
    assert spark_home(jars) is None, "one more"
    make_spark_home(jars)
    assert spark_home(jars) is not None
    (pyspark / "jars" / "spark-sql_2.13-4.2.1.jar").unlink()
    assert spark_home(jars) is None, "one less"


def test_homes_of_other_sparks_are_removed(tmp_path, pyspark):
    (tmp_path / "jars" / "spark-home-old" / "jars").mkdir(parents=True)
    make_spark_home(tmp_path / "jars")
    assert list((tmp_path / "jars").iterdir()) == [spark_home(tmp_path / "jars")]


def test_an_archive_belongs_to_the_spark_home_too(tmp_path, pyspark):
    archive_path(tmp_path, JARS).touch()
    make_spark_home(tmp_path)
    assert java_options(tmp_path, JARS) == ""
