"""A changefeed's record in the metadata: what to replicate, from when, in which state. Pure.

`info` changes only by the owner's API and on errors; `status` (the checkpoint) changes all the
time, so they are two records. Source: TiCDC's ChangeFeedInfo and ChangeFeedStatus, the members that
are used here.
"""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import APPEND
from pyspark_tidemark.lake.registry import FORMATS
from pyspark_tidemark.sink_uri import SinkUri, format_of, holds_secret, redacted, settings_of

from gcsafepoint.explain.names import feed_service
from server.changefeed.event_filter import EventFilter
from server.changefeed.filter import exact_rules
from server.changefeed.salt import Salt
from server.changefeed.table import TableRecord
from server.version import VERSION
from sink.retention import Retention
from storage.model.errors import CorruptError, InvalidError
from storage.tidb.field_type import NULL_DATES

LAKES: Final = tuple(FORMATS)
"""Formats of sinks that a lake job keeps."""
_HISTORY_LOST: Final = ("ErrSnapshotLostByGC", "ErrStartTsBeforeGC", "ErrGCTTLExceeded")
_WHEN_UNREADABLE: Final = (
    "A later version may have written it: run that one. Until then the changefeed does not run, "
    "GC keeps what its service safepoint holds, and `changefeed remove` gives it up"
)
_ID = re.compile(r"[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*")
_ID_CHARACTERS_MAX = 128
READER_TTL_S: Final = 7 * 24 * 3600
"""Kafka's for the offsets of a group that is gone."""
_MASKING: Final = ("masks", "salt_file", "salt_check", "routes")
_READING: Final = ("retain_s", "retain_bytes", "reader_ttl_s", "gc_generation")
_PORTS: Final = {name: record.port for name, record in FORMATS.items() if record.is_database}


class ChangefeedIdInvalidError(InvalidError):
    """The id cannot be a changefeed's."""

    code = "ErrInvalidChangefeedID"


class SinkUriError(InvalidError):
    """The sink URI cannot be used."""

    code = "ErrSinkURIInvalid"


class State(enum.StrEnum):
    """TiCDC's states that occur here."""

    NORMAL = "normal"
    STOPPED = "stopped"
    WARNING = "warning"
    FAILED = "failed"
    FINISHED = "finished"
    """Everything up to target_ts is at the target."""
    REMOVED = "removed"
    """The removal has begun: whoever owns the changefeeds brings it to its end."""

    @property
    def is_running(self) -> bool:
        """Whether its rows should be pulled."""
        return self in (State.NORMAL, State.WARNING)

    @property
    def is_final(self) -> bool:
        """Whether the state can only be followed by removal."""
        return self in (State.FINISHED, State.REMOVED)


@dataclass(frozen=True, slots=True)
class RunningError:
    """Why a changefeed is in state warning or failed; `time` is RFC 3339, UTC."""

    code: str
    message: str
    time: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """Changes with `start_ts < commit_ts <= end_ts` that an operator gave up by `resume
    --overwrite-checkpoint-ts`.
    """

    start_ts: int
    end_ts: int
    time: str
    """RFC 3339, UTC."""


@dataclass(frozen=True, slots=True)
class FilterUpdate:
    """A table filter of `changefeed update` that is not in force yet.

    Until the checkpoint reaches `ts`, only the tables are replicated that all filters take: those
    of `before` and `ChangefeedInfo.rules`. At `ts` tables that the new filter leaves out go, and
    new tables come. So do tables that one of the earlier filters did not take, as their rows were
    not delivered meanwhile.
    """

    before: tuple[tuple[str, ...], ...]
    """The filter that is in force, and those after it that were given up for `rules`, where they
    had left tables out.
    """
    ts: int
    is_planned: bool = True
    """Whether tables come and go at `ts`; else the changefeed chooses another ts, since cuts cannot
    end at `ts`: tables are read again there.
    """
    dumps: bool = True
    """Whether the existing rows of new tables are copied."""
    excludes: bool = True
    """Whether the tables that go are excluded already; else they are replicated up to `ts`, because
    without any table the checkpoint would advance without a reader.
    """

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "FilterUpdate":
        """Read what `asdict` made; raises KeyError, TypeError, ValueError."""
        return cls(
            tuple(tuple(map(str, rules)) for rules in document["before"]),
            int(document["ts"]),
            bool(document["is_planned"]),
            bool(document["dumps"]),
            bool(document["excludes"]),
        )


@dataclass(frozen=True, slots=True)
class TableTerms:
    """What is taken of tables, and how readers are shown it; the members are those of
    `ChangefeedInfo`.
    """

    columns: tuple[str, ...] = ()
    event_filters: tuple[EventFilter, ...] = ()
    masks: tuple[str, ...] = ()
    salt_file: str = ""
    salt_check: str = ""

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "TableTerms":
        """Read what `asdict` made; raises KeyError, TypeError, ValueError."""
        return cls(
            tuple(map(str, document["columns"])),
            tuple(map(EventFilter.from_document, document["event_filters"])),
            tuple(map(str, document["masks"])),
            str(document["salt_file"]),
            str(document["salt_check"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangefeedInfo:
    """A changefeed's record; `target_ts` 0 means no end."""

    id: str
    sink_uri: str = field(repr=False)
    """The sink URI as it was given; records of earlier versions may hold a password, so
    `shown_sink_uri` is what is shown.
    """
    source_uri: str = ""
    """Empty: the change feed of the cluster."""
    start_ts: int
    target_ts: int
    create_time: str
    rules: tuple[str, ...] = ()
    """The tables' filter, `server.changefeed.filter`."""
    columns: tuple[str, ...] = ()
    """The rules for columns, as in `server.changefeed.columns`."""
    event_filters: tuple[EventFilter, ...] = ()
    """The changes that are ignored, `server.changefeed.event_filter`."""
    masks: tuple[str, ...] = ()
    """Which columns readers are shown by masks, `server.changefeed.masks`."""
    salt_file: str = ""
    """The path of the salt of hashing masks, the same on every capture; never the salt itself."""
    routes: tuple[str, ...] = ()
    """The names of tables in the target, `server.changefeed.routes`."""
    salt_check: str = ""
    """A check value that recognises the salt."""
    region_threshold: int = 0
    """Tables with so many regions are split over captures; 0: none is."""
    zero_dates: str = NULL_DATES
    """The presentation of dates that no calendar has, one of
    `storage.tidb.field_type.SHOWN_DATES`.
    """
    from_snapshot: bool = False
    """Whether its tables were discovered in the source; else they were given."""
    ignore_ineligible: bool = False
    """Whether tables are left out that match the filter but cannot be replicated."""
    ignored: tuple[str, ...] = ()
    """The tables that were left out at the start."""
    tables: tuple[TableRecord, ...] = ()
    """Only in records of version 0.1.0, which have no schema changes."""
    state: State = State.NORMAL
    error: RunningError | None = None
    skipped: tuple[Skipped, ...] = ()
    """The ranges that were never delivered, ascending."""
    audit_s: int = 0
    """The period in seconds within which the whole lake is compared with the source; 0:
    no audit.
    """
    epoch: int = 0
    """Counts how often the checkpoint was moved back; acknowledgements of readers that began before
    the last time are ignored.
    """
    filter_update: FilterUpdate | None = None
    """A new filter that is coming in force; `rules` are the new ones already."""
    coming_terms: TableTerms | None = None
    """What comes in force with `filter_update`; None: `terms` stay."""
    retain_s: int = 0
    """For how many seconds acknowledged history is kept; `retain_bytes` limits its size."""
    retain_bytes: int = 0
    reader_ttl_s: int = 0
    """The time in seconds after which history is no longer kept for a named reader that
    acknowledges nothing; 0: the default.
    """
    gc_generation: int = 0
    """Distinguishes its service safepoint from those of removed changefeeds of the same id."""
    creator_version: str = VERSION

    @property
    def gc_service(self) -> str:
        """The service that keeps its history at the coordinator."""
        return feed_service(self.id, self.gc_generation)

    @property
    def salt(self) -> Salt | None:
        """The salt of masks that hash; None: there are no such masks."""
        return Salt(self.salt_file, self.salt_check) if self.salt_file else None

    @property
    def terms(self) -> TableTerms:
        """What is taken of its tables."""
        own = (self.columns, self.event_filters, self.masks, self.salt_file, self.salt_check)
        return TableTerms(*own)

    def with_terms(self, terms: TableTerms | None) -> "ChangefeedInfo":
        """The record with other terms in force; None: the same ones."""
        if terms is None:
            return self
        members = {each.name: getattr(terms, each.name) for each in fields(terms)}
        return replace(self, coming_terms=None, **members)

    @property
    def retention(self) -> Retention:
        """The limits of acknowledged history that is kept."""
        return Retention(self.retain_s, self.retain_bytes)

    @property
    def reader_limit_s(self) -> int:
        """The time in seconds for which history is kept for a silent reader."""
        return self.reader_ttl_s or READER_TTL_S

    @property
    def stop_ts(self) -> int:
        """The ts at which it stops for its end or for a new filter; 0: nowhere."""
        update = self.filter_update
        stops = (self.target_ts, update.ts if update is not None and update.is_planned else 0)
        return min(filter(None, stops), default=0)

    @property
    def shown_sink_uri(self) -> str:
        """The sink URI without secrets."""
        return redacted(self.sink_uri)

    @property
    def secret_advice(self) -> str:
        """Advice about a sink URI that holds a secret; empty if it holds none."""
        if not holds_secret(self.sink_uri):
            return ""
        return (
            f"the sink URI of changefeed {self.id} holds a password, which is in the metadata; "
            f"write it into a file, name that by `tidemark cli changefeed update -c {self.id} "
            "--sink-uri …?password-file=/path`, and change it"
        )

    @property
    def blocks_gc(self) -> bool:
        """Whether its history must be kept: yes, unless it is lost already or no longer needed."""
        if self.state.is_final:
            return False
        return self.error is None or self.error.code not in _HISTORY_LOST

    def moved_to(self, state: State, error: RunningError | None = None) -> "ChangefeedInfo":
        """The same record in another state."""
        return replace(self, state=state, error=error)

    def continuing_at(self, start_ts: int, checkpoint_ts: int, time: str) -> "ChangefeedInfo":
        """The record of the running changefeed that continues at `start_ts` instead of its
        checkpoint.

        Going back begins another epoch. A skipped range above `start_ts` is no longer skipped, if
        no reader has acknowledged anything above it. A pending filter is in force at once.
        """
        skipped = list(self.skipped)
        if start_ts > checkpoint_ts:
            skipped.append(Skipped(checkpoint_ts, start_ts, time))
        # A gap that ends where the changefeed stands is delivered after all, down to start_ts. One
        # below rows that were acknowledged stays: the lake has those rows without it.
        reached_ts = checkpoint_ts
        while skipped and start_ts < skipped[-1].end_ts == reached_ts:
            last = skipped.pop()
            reached_ts = last.start_ts
            if last.start_ts < start_ts:
                skipped.append(replace(last, end_ts=start_ts))
        epoch = self.epoch + (start_ts < checkpoint_ts)
        running = replace(self.moved_to(State.NORMAL), filter_update=None)
        running = running.with_terms(self.coming_terms)
        return replace(running, skipped=tuple(skipped), epoch=epoch)

    def without_tables(self) -> "ChangefeedInfo":
        """A record of version 0.1.0 in today's form; its tables are the first schema change."""
        rules = exact_rules((table.schema_name, table.table_name) for table in self.tables)
        return replace(self, tables=(), rules=rules, creator_version=VERSION)

    def to_json(self) -> bytes:
        """The value of its record."""
        doc = asdict(self)
        # A capture of an earlier version refuses a record with a member that it does not know.
        # What asks for nothing is left out, so that both versions can own such a changefeed.
        optional = ("columns", "event_filters", "skipped", "audit_s", "epoch", "filter_update")
        for member in (*optional, "coming_terms", "region_threshold", *_MASKING, *_READING):
            if not doc[member]:
                del doc[member]
        if self.zero_dates == NULL_DATES:
            del doc["zero_dates"]
        return json.dumps(doc, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> "ChangefeedInfo":
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            for member in ("rules", "columns", "masks", "routes", "ignored"):
                doc[member] = tuple(map(str, doc.get(member, ())))
            doc["tables"] = tuple(TableRecord(**table) for table in doc["tables"])
            doc["event_filters"] = tuple(
                map(EventFilter.from_document, doc.get("event_filters", ()))
            )
            doc["skipped"] = tuple(Skipped(**each) for each in doc.get("skipped", ()))
            for member in ("audit_s", "epoch", "region_threshold", *_READING):
                doc[member] = int(doc.get(member, 0))
            if doc.get("filter_update") is not None:
                doc["filter_update"] = FilterUpdate.from_document(doc["filter_update"])
            if doc.get("coming_terms") is not None:
                doc["coming_terms"] = TableTerms.from_document(doc["coming_terms"])
            doc["state"] = State(doc["state"])
            doc["error"] = RunningError(**doc["error"]) if doc["error"] else None
            return _with_types(cls(**doc))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise CorruptError(
                f"a changefeed's record in the metadata cannot be read: {err!r}"
            ) from err


def _with_types(info: ChangefeedInfo) -> ChangefeedInfo:
    """Raise TypeError for values of wrong types, which would fail later where the record is not
    known.
    """
    texts = (info.id, info.sink_uri, info.source_uri, info.create_time, info.zero_dates)
    salt = (info.salt_file, info.salt_check)
    numbers = (info.start_ts, info.target_ts)
    if not all(isinstance(each, str) for each in (*texts, *salt)):
        raise TypeError("a member that must be a text is none")
    if not all(type(each) is int for each in numbers):
        raise TypeError("a member that must be a number is none")
    return info


def read_info(key: bytes, value: bytes) -> ChangefeedInfo:
    """The record of a changefeed under its key in the metadata.

    Raises:
        CorruptError: it cannot be read, or is of another changefeed; names the changefeed.
    """
    changefeed = key.rpartition(b"/")[2].decode(errors="replace")
    try:
        info = ChangefeedInfo.from_json(value)
    except CorruptError as err:
        raise _unreadable(changefeed, err.message) from err
    if info.id != changefeed:
        raise _unreadable(changefeed, f"the record is of a changefeed {info.id!r}")
    return info


def unreadable_info(changefeed: str) -> ChangefeedInfo:
    """A stand-in for a record that cannot be read; never to be written."""
    return ChangefeedInfo(
        id=changefeed, sink_uri="", start_ts=0, target_ts=0, create_time="", state=State.FAILED
    )


def status_json(checkpoint_ts: int) -> bytes:
    """The value of a status record."""
    return json.dumps({"checkpoint_ts": checkpoint_ts}).encode()


def checkpoint_of(value: bytes) -> int:
    """The checkpoint_ts of a status record; raises CorruptError."""
    try:
        return int(json.loads(value)["checkpoint_ts"])
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CorruptError(
            f"a changefeed's status in the metadata cannot be read: {err!r}"
        ) from err


def read_checkpoint(changefeed: str, value: bytes) -> int:
    """The checkpoint_ts of a changefeed's status record.

    Raises:
        CorruptError: it cannot be read; names the changefeed.
    """
    try:
        return checkpoint_of(value)
    except CorruptError as err:
        raise _unreadable(changefeed, err.message) from err


def _unreadable(changefeed: str, reason: str) -> CorruptError:
    return CorruptError(f"changefeed {changefeed!r}: {reason}. {_WHEN_UNREADABLE}")


def check_id(changefeed: str) -> None:
    """Check that an id can be part of a key and of a path.

    Raises:
        ChangefeedIdInvalidError: with the rule.
    """
    if len(changefeed) > _ID_CHARACTERS_MAX or not _ID.fullmatch(changefeed):
        raise ChangefeedIdInvalidError(
            f"{changefeed!r} cannot be a changefeed id: letters and digits, with single hyphens "
            "between, at most 128"
        )


def lake_format(sink_uri: str) -> str:
    """The format of a sink that a lake job keeps, `FORMAT:…` or `FORMAT+SCHEME:…`; empty:
    none does.
    """
    name = format_of(sink_uri)
    return name if name in LAKES else ""


def keeps_changes(sink_uri: str) -> bool:
    """Whether the sink receives every change, and not only the newest version of each row: the
    lake's mode is `append`, or the reader decides.
    """
    lake = lake_format(sink_uri)
    modes = FORMATS[lake].modes if lake else ()
    return not modes or settings_of(sink_uri).get("mode", modes[0]) == APPEND


def check_sink_uri(sink_uri: str) -> None:
    """Check that a reader can use the URI as its target; it may have no password, and name no
    directory of the system.

    Raises:
        SinkUriError: with what to write instead.
    """
    try:
        SinkUri.parse(sink_uri).check_directory()
    except SourceError as err:
        raise SinkUriError(err.message) from None


def check_same_sink(old: str, new: str) -> None:
    """Check that `new` names the same place as `old`, where some of the rows are already; `old` may
    have been written by an earlier version.

    Raises:
        SinkUriError: it names another place.
    """
    if _place(old) != _place(new):
        raise SinkUriError(
            f"{redacted(new)} is not the place that this changefeed delivers to, {redacted(old)}: "
            "an update changes how to log in there; for another place, create another changefeed"
        )


def _place(sink_uri: str) -> tuple[str, str, int | None, str]:
    try:
        parts = urlsplit(sink_uri)
        return (
            parts.scheme,
            parts.hostname or "",
            parts.port or _PORTS.get(parts.scheme),
            parts.path.strip("/"),
        )
    except ValueError:
        return sink_uri, "", None, ""
