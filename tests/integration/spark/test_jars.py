"""Jars are fetched whatever Maven has left in its local repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

POM = """<project>
<modelVersion>4.0.0</modelVersion>
<groupId>com.google.code.findbugs</groupId><artifactId>jsr305</artifactId><version>3.0.2</version>
</project>"""


@pytest.mark.timeout(300)
def test_a_local_repository_that_has_descriptions_without_jars_is_not_asked(tmp_path: Path) -> None:
    package = tmp_path / ".m2" / "repository" / "com/google/code/findbugs/jsr305/3.0.2"
    package.mkdir(parents=True)
    (package / "jsr305-3.0.2.pom").write_text(POM)
    command = [sys.executable, "-m", "pyspark_tidemark.jars", "--no-class-archive"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "jars"), "delta"],
        # Java asks the password file where the home is, not HOME.
        env=os.environ | {"JAVA_TOOL_OPTIONS": f"-Duser.home={tmp_path}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    log = (tmp_path / "jars" / "delta.log").read_text()
    if "unresolved dependency" in log:
        pytest.skip("no Maven repository is reachable")
    assert done.returncode == 0, done.stderr + log[-3000:]
    assert len(done.stderr.splitlines()) <= 3, done.stderr  # the lines of Spark are in the log
    assert ":: resolving dependencies" in log
    assert any((tmp_path / "jars").glob("io.delta_delta-spark_*.jar"))
