"""What a lake job prints besides its own lines, how a query ended and nothing of Arrow's; and what
it finds of one before that was killed.
"""

import subprocess
import sys

from pyspark_tidemark.job import _query_failure
from pyspark_tidemark.lake.session import _scratch

SPARKS = """Python worker failed to connect back.
=== Streaming Query ===
Identifier: tidemark [id = 74eed1f2, runId = 3d4e6400]
Current Committed Offsets: {}
Thread State: RUNNABLE"""


def test_it_is_the_line_that_the_supervisor_reads_from_the_job_and_reports_too():
    """Two texts of one error were two lines of a capture's log, and counted twice."""
    error = _query_failure(Exception(SPARKS))
    assert error.message == (
        "Spark ended the query: Python worker failed to connect back. Spark gives it ten seconds to "
        "begin: the machine is too busy, or short of memory"
    )
    assert error.retryable
    assert len(str(error).splitlines()) == 1


def test_a_query_that_ended_without_a_word_is_told_as_well():
    assert _query_failure(None).message == "Spark ended the query: None"
    assert _query_failure(Exception("")).message == "Spark ended the query: "


def test_arrow_does_not_warn_of_rows_that_came_over_flight():
    """It did so ten times a cut, in C++: only a process of its own shows it."""
    code = (
        "import pyarrow as pa; from pyspark_tidemark.lake.session import silence_arrow\n"
        "silence_arrow()\n"
        "buffer = pa.allocate_buffer(81).slice(1, 80)\n"
        "column = pa.Array.from_buffers(pa.int64(), 10, [None, buffer])\n"
        "pa.table({'a': column}).group_by('a').aggregate([([], 'count_all')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stderr == b""


def test_what_a_spark_that_was_killed_left_on_the_disk_goes_unless_another_one_runs(tmp_path):
    left = tmp_path / "local" / "blockmgr-1" / "0c"
    left.mkdir(parents=True)
    assert _scratch(tmp_path) == tmp_path / "local"
    assert not left.parent.exists()
    left.mkdir(parents=True)
    _scratch(tmp_path)
    assert left.exists(), "this process uses it now"
