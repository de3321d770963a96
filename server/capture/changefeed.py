"""A changefeed as the metadata holds it: what to replicate, from when, in which state. Pure.

`info` changes only by the owner's API and on errors; `status` (the checkpoint) changes all the time, so they are two
records. Source: TiCDC's ChangeFeedInfo and ChangeFeedStatus, the members that are used here.
"""

import enum
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Final

from server.capture.catalog.filter import exact_rules
from server.capture.errors import ChangefeedIdInvalidError, SinkUriError
from server.puller.table import TableRecord
from storage.model.errors import CorruptError

CREATOR_VERSION: Final = "0.2.0"
_ID = re.compile(r"[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*")
_ID_CHARACTERS_MAX = 128
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
_REMOTE = re.compile(r"(((delta|parquet)\+(hdfs|viewfs|s3a))|(iceberg\+(hdfs|viewfs)))://[^@?]*/[^@?]*")
"""Lakes on other file systems, as the lake job takes them: `pyspark_tidemark.lake.target`."""


class State(enum.StrEnum):
    """TiCDC's states that occur here."""

    NORMAL = "normal"
    STOPPED = "stopped"
    WARNING = "warning"
    FAILED = "failed"

    @property
    def is_running(self) -> bool:
        """Whether rows are to be pulled."""
        return self in (State.NORMAL, State.WARNING)


@dataclass(frozen=True, slots=True)
class RunningError:
    """Why a changefeed is in state warning or failed; `time` is RFC 3339, UTC."""

    code: str
    message: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangefeedInfo:
    """`target_ts` 0 means no end."""

    id: str
    sink_uri: str
    source_uri: str = ""
    """Empty: the change feed of the cluster."""
    start_ts: int
    target_ts: int
    create_time: str
    rules: tuple[str, ...] = ()
    """The tables' filter, `server.capture.catalog.filter`."""
    columns: tuple[str, ...] = ()
    """What is taken of the tables, `server.capture.catalog.columns`."""
    from_snapshot: bool = False
    """Whether its tables were found in the source; else they were given."""
    ignore_ineligible: bool = False
    """Whether tables that match the filter, but cannot be replicated, are left out."""
    ignored: tuple[str, ...] = ()
    """Those that were left out at the start."""
    tables: tuple[TableRecord, ...] = ()
    """In records of version 0.1.0, which have no schema changes."""
    state: State = State.NORMAL
    error: RunningError | None = None
    creator_version: str = CREATOR_VERSION

    @property
    def blocks_gc(self) -> bool:
        """Whether its history must be kept: always, except when it is lost already."""
        return self.error is None or self.error.code not in ("ErrSnapshotLostByGC", "ErrStartTsBeforeGC")

    def moved_to(self, state: State, error: RunningError | None = None) -> "ChangefeedInfo":
        """The same changefeed in another state."""
        return replace(self, state=state, error=error)

    def without_tables(self) -> "ChangefeedInfo":
        """A record of version 0.1.0 in today's form; its tables are the first schema change."""
        rules = exact_rules((table.schema_name, table.table_name) for table in self.tables)
        return replace(self, tables=(), rules=rules, creator_version=CREATOR_VERSION)

    def to_json(self) -> bytes:
        """The value of its record."""
        doc = asdict(self)
        if not self.columns:
            del doc["columns"]  # as captures read it that know of none
        return json.dumps(doc, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> "ChangefeedInfo":
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            for member in ("rules", "columns", "ignored"):
                doc[member] = tuple(map(str, doc.get(member, ())))
            doc["tables"] = tuple(TableRecord(**table) for table in doc["tables"])
            doc["state"] = State(doc["state"])
            doc["error"] = RunningError(**doc["error"]) if doc["error"] else None
            return cls(**doc)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CorruptError(f"a changefeed's record in the metadata cannot be read: {err!r}") from err


def status_json(checkpoint_ts: int) -> bytes:
    """The value of a status record."""
    return json.dumps({"checkpoint_ts": checkpoint_ts}).encode()


def checkpoint_of(value: bytes) -> int:
    """The checkpoint_ts of a status record; raises CorruptError."""
    try:
        return int(json.loads(value)["checkpoint_ts"])
    except (ValueError, KeyError, TypeError) as err:
        raise CorruptError(f"a changefeed's status in the metadata cannot be read: {err!r}") from err


def check_id(changefeed: str) -> None:
    """Refuse what cannot be part of a key or a path.

    Raises:
        ChangefeedIdInvalidError: with the rule.
    """
    if len(changefeed) > _ID_CHARACTERS_MAX or not _ID.fullmatch(changefeed):
        raise ChangefeedIdInvalidError(
            f"{changefeed!r} cannot be a changefeed id: letters and digits, with single hyphens between, at most 128"
        )


def check_sink_uri(sink_uri: str) -> None:
    """Refuse what no reader could take as its target.

    Raises:
        SinkUriError: there is no scheme, or one of a lake on a file system that can hold none.
    """
    scheme = sink_uri.partition(":")[0]
    if "+" in scheme and not _REMOTE.fullmatch(sink_uri):
        raise SinkUriError(
            "a lake on another file system is FORMAT+SCHEME://authority/path: delta, parquet or iceberg on hdfs or "
            "viewfs, delta or parquet on s3a, with credentials and settings where Hadoop looks for them"
        )
    if not _SCHEME.match(sink_uri):
        raise SinkUriError(
            f"the sink URI {sink_uri!r} has no scheme; give one such as delta:///path or parquet:///path"
        )
