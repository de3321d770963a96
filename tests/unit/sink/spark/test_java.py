import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.java import check_java


def java_that_says(directory, text):
    (directory / "bin").mkdir()
    program = directory / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n", encoding="utf-8")
    program.chmod(0o755)


def test_without_java_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SourceError, match=r"\[TM:ErrJavaNotFound\] there is no java .* install one"
    ):
        check_java()


@pytest.mark.parametrize(
    ("text", "usable"), [('openjdk version "17.0.15" 2025', True), ('java version "1.8.0"', False)]
)
def test_an_old_java_is_refused(tmp_path, monkeypatch, text, usable):
    java_that_says(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if usable:
        check_java()
    else:
        with pytest.raises(SourceError, match="ErrJavaNotFound"):
            check_java()
