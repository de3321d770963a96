"""A class archive that a job's JVM can use."""

import subprocess
import sys

import pytest
from pyspark_tidemark.jars import default_directory, installed
from pyspark_tidemark.java import java_options

pytestmark = pytest.mark.timeout(600)

# Java starts with -Xshare:on only if it can use the archive as a whole.
SESSION = """
import sys
from pathlib import Path
from pyspark_tidemark.lake.session import open_session
extra = {"spark.driver.extraJavaOptions": "-Xshare:on -XX:+UseSerialGC"}
spark = open_session(
    master="local[1]", driver_memory="1g", directory=Path(sys.argv[1]), lake="delta", extra=extra
)
print(spark.range(3).count())
"""


def test_a_session_uses_the_archive_that_setup_made(tmp_path):
    if not java_options(default_directory(), installed(default_directory())):
        pytest.skip("there is no class archive; `make jars` makes it")
    ran = subprocess.run(
        [sys.executable, "-c", SESSION, tmp_path], capture_output=True, text=True, check=False
    )
    assert ran.stdout.split()[-1:] == ["3"], ran.stdout + ran.stderr
