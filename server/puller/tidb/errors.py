"""Why a TiDB cluster's tables cannot be followed (any further)."""

from storage.model.errors import InvalidError


class HistoryLostError(InvalidError):
    """The store's GC has passed a timestamp that is still needed."""

    code = "ErrSnapshotLostByGC"


class SchemaGapError(InvalidError):
    """A schema change is not to be found, so rows after it cannot be read."""

    code = "ErrSchemaGap"


class DdlUnsupportedError(InvalidError):
    """A DDL brings rows into a table, or changes them, without writing them."""

    code = "ErrDdlUnsupported"
