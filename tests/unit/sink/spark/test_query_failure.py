"""What a query is said to have ended by."""

from pyspark_tidemark.job import _query_failure

SPARKS = """Python worker failed to connect back.
=== Streaming Query ===
Identifier: tidemark [id = 74eed1f2, runId = 3d4e6400]
Current Committed Offsets: {}
Thread State: RUNNABLE"""


def test_it_is_the_line_that_the_supervisor_reads_from_the_job_and_reports_too():
    """Two texts of one error were two lines of a capture's log, and counted twice."""
    error = _query_failure(Exception(SPARKS))
    assert error.message == "Spark ended the query: Python worker failed to connect back."
    assert error.retryable
    assert len(str(error).splitlines()) == 1


def test_a_query_that_ended_without_a_word_is_told_as_well():
    assert _query_failure(None).message == "Spark ended the query: None"
    assert _query_failure(Exception("")).message == "Spark ended the query: "
