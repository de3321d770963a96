"""Whatever ends the lake job has a code, and says whether starting again can mend it."""

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import (
    AnalysisException,
    NumberFormatException,
    PySparkRuntimeError,
    UnsupportedOperationException,
)
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.failure import in_table, named


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (pa.ArrowInvalid("No match for FieldRef.Name(uid) in id: int32"), "ErrJobInternal", False),
        (KeyError("uid"), "ErrJobInternal", False),
        (TypeError("NoneType is not iterable"), "ErrJobInternal", False),
        (AssertionError(), "ErrJobInternal", False),
        (
            AnalysisException(
                "[FIELD_ALREADY_EXISTS] Cannot rename column, because `V` already exists"
            ),
            "ErrTargetRefused",
            False,
        ),
        (
            AnalysisException("[DELTA_INVALID_CHARACTERS_IN_COLUMN_NAMES] a b"),
            "ErrTargetRefused",
            False,
        ),
        (
            PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited"),
            "ErrQueryFailed",
            True,
        ),
        (
            PySparkRuntimeError(
                "[DELTA_VERSIONS_NOT_CONTIGUOUS] Versions (0, 2) are not contiguous."
            ),
            "ErrLakeDamaged",
            True,
        ),
        (
            PySparkRuntimeError(
                "o451.sql. : [DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint c"
            ),
            "ErrTargetRefused",
            False,
        ),
        (
            UnsupportedOperationException("[DELTA_PROTOCOL_PROPERTY_NOT_INT] Protocol property x"),
            "ErrTargetRefused",
            False,
        ),
        (
            PySparkRuntimeError("[FAILED_READ_FILE.FILE_NOT_EXIST] File does not exist."),
            "ErrLakeDamaged",
            True,
        ),
        (
            Py4JError(
                "o1.load. : [FAILED_READ_FILE.NO_HINT] Encountered error while reading file 3.checkpoint."
                "parquet. Caused by: java.lang.RuntimeException: 3.checkpoint.parquet is not a "
                "Parquet file. Expected magic number at tail"
            ),
            "ErrLakeDamaged",
            True,
        ),
        (PySparkRuntimeError("[FAILED_READ_FILE.NO_HINT] timed out"), "ErrQueryFailed", True),
        (NumberFormatException('For input string: "lots"'), "ErrTargetRefused", False),
        (OSError(5, "Input/output error"), "ErrQueryFailed", True),
        (ConnectionResetError(), "ErrQueryFailed", True),
        (OSError(28, "No space left on device"), "ErrTargetFull", True),
        (MemoryError(), "ErrJobMemory", True),
        (
            RuntimeError("File x.py\nSourceError: [TM:ErrSchemaIncompatible] a value does not fit"),
            "ErrSchemaIncompatible",
            False,
        ),
        (RuntimeError("SourceError: [TM:ErrNotResolved] later"), "ErrNotResolved", True),
    ],
)
def test_an_exception_has_a_code_and_its_cause(error, code, retryable):
    found = named(error)
    assert (found.code, found.retryable) == (code, retryable)
    if "[TM:" not in str(error) and code != "ErrTargetFull":
        assert type(error).__name__ in found.message
        assert str(error).strip("'") in found.message or "ArrowInvalid" in found.message


def test_an_error_of_ours_stays_as_it_is_and_names_its_table_once():
    ours = SourceError("ErrTargetBusy", "somebody else writes", retryable=True)
    assert named(ours) is ours
    told = in_table(ours, "shop.t")
    assert (told.code, told.message, told.retryable) == (
        "ErrTargetBusy",
        "shop.t: somebody else writes",
        True,
    )
    assert in_table(told, "shop.t") is told


def test_a_cause_is_short_and_in_one_line():
    text = "first\n\tsecond\n" + "x" * 10_000
    assert named(ValueError(text)).message.startswith(
        "the job met what it has no rule for: ValueError: first second x"
    )
    assert len(named(ValueError(text)).message) < 1000


def test_a_jar_that_is_gone_is_named_without_javas_stack():
    text = (
        "An error occurred while calling o51.load.\n: java.lang.NoClassDefFoundError: io/delta/Log\n"
        "\tat org.apache.spark.x(X.scala:1)\n\tat java.base/y(Y.java:2)"
    )
    error = named(Py4JError(text))
    assert (error.code, error.retryable) == ("ErrJarsUnavailable", True)
    assert "NoClassDefFoundError: io/delta/Log)" in error.message
    assert "python -m pyspark_tidemark.jars" in error.message
