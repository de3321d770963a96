"""Whether this machine can run Spark at all, asked before anything is started."""

from storage.model.errors import InvalidError


class JavaMissingError(InvalidError):
    """Spark cannot run on this machine."""

    code = "ErrJavaNotFound"


def require_java(otherwise: str = "") -> None:
    """Refuse early.

    Raises:
        JavaMissingError: there is no Java that Spark can use; `otherwise` says what else the user
            can do.
    """
    from pyspark_tidemark.errors import SourceError
    from pyspark_tidemark.java import check_java

    try:
        check_java()
    except SourceError as err:
        advice = f", {otherwise}" if otherwise else ""
        raise JavaMissingError(f"{err.message}{advice}") from None
