"""Any exception of the lake job as an error with a code,
and whether starting the job again can mend it.

A start cannot mend a refusal of Spark's analyser or of a capture, nor an exception by a mistake in
data or program: the same input raises it again. It may mend errors of networks, disks,
memory and Spark's own processes.
"""

from typing import Final

import pyarrow as pa
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    UnsupportedOperationException,
)

from pyspark_tidemark.errors import MOVED_BACK, SourceError, from_text
from pyspark_tidemark.lake.files import RESTORE

_REFUSED: Final = (
    AnalysisException,
    IllegalArgumentException,
    ParseException,
    UnsupportedOperationException,
)
_MISTAKES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
    pa.ArrowInvalid,
    pa.ArrowKeyError,
    pa.ArrowNotImplementedError,
    pa.ArrowTypeError,
)
_PERMANENT_CODES: Final = frozenset(
    {
        "ErrChangeFeedNotExists",
        "ErrCheckpointForeign",
        "ErrCredentials",
        "ErrKeyValueUnsupported",
        "ErrOptionInvalid",
        "ErrPartitionUnsupported",
        "ErrRangeCleaned",
        "ErrRangeCrossesDdl",
        "ErrSchemaIncompatible",
        "ErrUnauthenticated",
        "ErrUnauthorized",
    }
)
"""Codes whose errors cannot heal, for errors that come as text out of Spark's Python processes."""
_ASKED_MORE: Final = (
    "[DELTA_CANNOT_MODIFY_APPEND_ONLY]",
    "[DELTA_CLUSTERING_COLUMN_MISSING_STATS]",
    "[DELTA_FEATURES_PROTOCOL_METADATA_MISMATCH]",
    "[DELTA_ICEBERG_COMPAT_VIOLATION",
    "[DELTA_INVALID_PROTOCOL_VERSION]",
    "[DELTA_MISSING_ICEBERG_CLASS]",
    "[DELTA_NOT_NULL_CONSTRAINT_VIOLATED]",
    "[DELTA_PATH_BASED_ACCESS_TO_CATALOG_MANAGED_TABLE_BLOCKED]",
    "[DELTA_ROW_ID_ASSIGNMENT_WITHOUT_STATS]",
    "[DELTA_UNRECOGNIZED_INVARIANT]",
    "[DELTA_UNSUPPORTED_CATALOG_MANAGED_TABLE_OPERATION]",
    "[DELTA_UNSUPPORTED_FEATURES_FOR_READ]",
    "[DELTA_UNSUPPORTED_FEATURES_FOR_WRITE]",
    "[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES]",
)
"""What Delta says where somebody else has asked more of a table than its rows, or this version of
Delta, can keep.
"""
_DAMAGED: Final = (
    "[DELTA_CHECKPOINT_SNAPSHOT_MISMATCH]",
    "[DELTA_DELETION_VECTOR_CARDINALITY_MISMATCH]",
    "[DELTA_DELETION_VECTOR_CHECKSUM_MISMATCH]",
    "[DELTA_DELETION_VECTOR_INVALID_ROW_INDEX]",
    "[DELTA_DELETION_VECTOR_SIZE_MISMATCH]",
    "[DELTA_FILE_NOT_FOUND]",
    "[DELTA_LOG_FILE_NOT_FOUND]",
    "[DELTA_MISSING_COMMIT_INFO]",
    "[DELTA_MISSING_COMMIT_TIMESTAMP]",
    "[DELTA_MISSING_PART_FILES]",
    "[DELTA_STATE_RECOVER_ERROR]",
    "[DELTA_TRUNCATED_TRANSACTION_LOG]",
    "[DELTA_TXN_LOG_FAILED_INTEGRITY]",
    "[DELTA_VERSIONS_NOT_CONTIGUOUS]",
    "[FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER]",
    "[FAILED_READ_FILE.FILE_NOT_EXIST]",
    "is not a Parquet file",
)
"""What Delta and Spark call logs and files that are not whole."""
_NO_CLASS: Final = ("java.lang.ClassNotFoundException", "java.lang.NoClassDefFoundError")
"""What Java says of a class whose jar is gone, or was replaced."""
_CAUSE_CHARACTERS_MAX = 600


def named(err: BaseException) -> SourceError:
    """`err` with a code; its own message is the cause."""
    if isinstance(err, SourceError):
        if err.code == MOVED_BACK:
            # A job that starts again gets the new epoch, and goes on where its lake ends.
            return SourceError(err.code, err.message, retryable=True)
        return err
    cause = cause_of(err)
    if error := _by_text(str(err), cause):
        return error
    if isinstance(err, MemoryError):
        return SourceError("ErrJobMemory", f"the job has no memory left: {cause}", retryable=True)
    if isinstance(err, NumberFormatException):
        return SourceError(
            "ErrTargetRefused",
            f"a table's property, or a setting of Spark's, is no number ({cause}): correct it, then "
            "start the job again",
        )
    if isinstance(err, _REFUSED):
        return SourceError("ErrTargetRefused", f"Spark refuses: {cause}")
    if isinstance(err, _MISTAKES):
        return SourceError("ErrJobInternal", f"the job met what it has no rule for: {cause}")
    return SourceError("ErrQueryFailed", cause, retryable=True)


def _by_text(text: str, cause: str) -> SourceError | None:
    """The error for what Java, Spark, Delta and our own code in other processes say in a text."""
    if "No space left on device" in text:
        return SourceError(
            "ErrTargetFull",
            "the target's disk is full; make room: the job goes on by itself",
            retryable=True,
        )
    if "[TM:" in text:
        error = from_text(text, retryable=True)
        return SourceError(error.code, error.message, retryable=error.code not in _PERMANENT_CODES)
    if any(said in text for said in _DAMAGED):
        # Another engine may only be removing old parts of the log.
        return SourceError(
            "ErrLakeDamaged",
            f"Spark cannot read a table of the lake ({cause}). If that stays so: {RESTORE}",
            retryable=True,
        )
    if any(said in text for said in _NO_CLASS):
        return SourceError(
            "ErrJarsUnavailable",
            f"Java lacks a class ({cause}): a jar is not there, or was removed since Spark began. "
            "`python -m pyspark_tidemark.jars all` fetches those of the lake formats; name others, "
            "as of a file system, by --conf spark.jars.packages=…; then start again",
            retryable=True,
        )
    if any(said in text for said in _ASKED_MORE):
        return SourceError(
            "ErrTargetRefused",
            f"Delta refuses the job's rows, as somebody else has changed the table ({cause}): take "
            "the constraint, property or feature back, then start the job again",
        )
    return None


def in_table(err: SourceError, table: str) -> SourceError:
    """`err`, with the table named in its message."""
    if table in err.message:
        return err
    return SourceError(err.code, f"{table}: {err.message}", retryable=err.retryable)


def cause_of(err: BaseException) -> str:
    """The exception's type and the beginning of what it says, without Java's stack, in one line;
    Spark's own classes say which they are in the text.
    """
    lines = [line.strip() for line in str(err).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("at "))
    text = text[:_CAUSE_CHARACTERS_MAX]
    return f"{type(err).__name__}: {text}" if text else type(err).__name__
