"""The options of `format("tidemark")`: parsed once, checked whole,
unknown ones refused with the nearest name.

Secrets come by file path only: options are part of plans and logs.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Mapping
from datetime import UTC, datetime

from pyspark_tidemark.errors import SourceError

NAMES = (
    "endpoint", "changefeed", "table", "tablePattern", "cuts", "envelope", "beforeImage", "commitTime",
    "startTs", "startingVersion", "startingTimestamp", "endTs", "endingVersion", "endingTimestamp",
    "schemaTs", "maxRowsPerTrigger", "maxBytesPerTrigger", "sliceBytes", "pollMs", "idleMs", "ack", "reader",
    "caPath", "certPath", "keyPath", "tokenFile", "traceparent",
)  # fmt: skip
LOGICAL_BITS = 18
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Paths of files; without a PEM file the connection is plaintext, without a token file it is
    anonymous.
    """

    ca_path: str = ""
    cert_path: str = ""
    key_path: str = ""
    token_file: str = ""
    """Its content goes as `Authorization: Bearer …`; read for each call,
    so that it can be renewed.
    """

    @property
    def encrypted(self) -> bool:
        """Whether the connection is TLS."""
        return bool(self.ca_path or self.cert_path or self.key_path)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to read, from where; timestamps are TSO (milliseconds << 18 | counter)."""

    endpoints: tuple[str, ...]
    """Flight addresses of captures, `grpc://host:port`;
    any of them answers for the whole changefeed.
    """
    changefeed: str
    table: str | None = None
    """`database.table`; None in cuts mode and with a pattern."""
    table_pattern: tuple[str, ...] = ()
    """Globs over `database.table`, such as `shop.*`;
    several tables fit into the envelope form only.
    """
    envelope: bool = False
    """Whether rows come in one schema for all tables, with key, before and after as JSON text."""
    before_image: bool = False
    """Whether updates and deletes carry the row as it was."""
    commit_time: bool = False
    """Whether rows have `_commit_time`, the wall clock of `_commit_ts`."""
    start_ts: int | None = None
    """Exclusive; None means the changefeed's checkpoint_ts."""
    end_ts: int | None = None
    """Inclusive; None means no end (stream) or what is resolved now (batch)."""
    schema_ts: int | None = None
    """The columns are those of rows above it; None means the larger of startTs and the changefeed's
    checkpoint_ts.
    """
    max_rows: int | None = None
    """Admission limit of one micro-batch; one commit_ts is never split,
    so a batch may be larger.
    """
    max_bytes: int | None = None
    """As `max_rows`, in bytes as the captures estimate them; with both the smaller batch counts."""
    slice_bytes: int = 32 << 20
    """About what one Spark task reads: larger tables are split by commit_ts,
    smaller ones put together.
    """
    ack: bool = True
    """Whether batches that Spark has committed move the changefeed's checkpoint."""
    reader: str = ""
    """The name of this reader, which `tidemark cli changefeed add-reader` has added: it has a
    position of its own; empty: the only one.
    """
    poll_ms: int = 200
    """How long the server may hold a poll that finds nothing new."""
    idle_ms: int | None = None
    """How old the position grows, in milliseconds, before a batch without rows moves it on, while
    nothing changes; None: as the captures have it, some seconds.
    """
    credentials: Credentials = Credentials()
    traceparent: str = ""
    """The span that the captures' spans of this read belong to, as W3C's Trace Context writes it;
    empty: none.
    """

    def chooses(self, table: str) -> bool:
        """Whether rows of `table` are wanted."""
        if self.table is not None:
            return table == self.table
        patterns = self.table_pattern or ("*",)
        return any(fnmatch.fnmatchcase(table, pattern) for pattern in patterns)


def parse(given: Mapping[str, str]) -> Options:
    """Check and type the options of one reader; names are case-insensitive.

    Raises:
        SourceError: ErrOptionInvalid, naming every fault.
    """
    texts = _Texts(given)
    cuts = texts.boolean("cuts", default=False)
    options = Options(
        endpoints=texts.required("endpoint"),
        changefeed=",".join(texts.required("changefeed")),
        table=texts.get("table") or None,
        table_pattern=texts.several("tablePattern"),
        envelope=texts.boolean("envelope", default=False),
        before_image=texts.boolean("beforeImage", default=False),
        commit_time=texts.boolean("commitTime", default=False),
        start_ts=texts.start_ts(),
        end_ts=texts.end_ts(),
        schema_ts=texts.timestamp("schemaTs"),
        max_rows=texts.positive("maxRowsPerTrigger"),
        max_bytes=texts.positive("maxBytesPerTrigger"),
        slice_bytes=texts.positive("sliceBytes") or Options.slice_bytes,
        ack=texts.boolean("ack", default=True),
        reader=texts.get("reader").strip(),
        poll_ms=texts.positive("pollMs") or Options.poll_ms,
        idle_ms=texts.positive("idleMs"),
        credentials=Credentials(
            *(texts.get(name) for name in ("caPath", "certPath", "keyPath", "tokenFile"))
        ),
        traceparent=texts.get("traceparent"),
    )
    faults = texts.faults + _contradictions(options, cuts=cuts)
    if faults:
        raise SourceError("ErrOptionInvalid", "; ".join(faults))
    return options


def _contradictions(options: Options, *, cuts: bool) -> list[str]:
    faults = []
    if any("@" in endpoint for endpoint in options.endpoints):
        # What stands before it may be a password, which errors and logs would show.
        faults.append("option 'endpoint' is grpc://host:port; a token comes by option 'tokenFile'")
    if cuts + bool(options.table) + bool(options.table_pattern) != 1:
        faults.append(
            "give option 'table' as database.table, or 'tablePattern', or 'cuts' as true, and "
            "only one"
        )
    if options.table_pattern and not options.envelope:
        faults.append(
            "option 'tablePattern' needs 'envelope' as true: tables of different columns share "
            "one schema there"
        )
    if cuts and (options.envelope or options.before_image or options.commit_time):
        faults.append("cuts have no rows: leave out 'envelope', 'beforeImage' and 'commitTime'")
    if (
        options.start_ts is not None
        and options.end_ts is not None
        and options.end_ts < options.start_ts
    ):
        faults.append(f"option 'endTs' ({options.end_ts}) is before 'startTs' ({options.start_ts})")
    return faults


class _Texts:
    """The given options by their right names, and what is wrong with them."""

    def __init__(self, given: Mapping[str, str]) -> None:
        spelling = {name.lower(): name for name in NAMES}
        values = {key.lower(): value for key, value in given.items()}
        self._texts = {spelling[key]: value for key, value in values.items() if key in spelling}
        self.faults = [_unknown(key, spelling) for key in values if key not in spelling]

    def get(self, name: str) -> str:
        """The text, empty if not given."""
        return self._texts.get(name, "")

    def several(self, name: str) -> tuple[str, ...]:
        """The parts between commas."""
        return tuple(part.strip() for part in self.get(name).split(",") if part.strip())

    def required(self, name: str) -> tuple[str, ...]:
        """As `several`, at least one."""
        texts = self.several(name)
        if not texts:
            self.faults.append(f"option {name!r} is missing")
        return texts

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false."""
        text = self._texts.get(name, str(default)).lower()
        if text not in _TRUE + _FALSE:
            self.faults.append(f"option {name!r} must be true or false, not {text!r}")
        return text in _TRUE

    def positive(self, name: str) -> int | None:
        """A whole number above 0, None if not given."""
        text = self._texts.get(name)
        if text is None:
            return None
        if not text.isdecimal() or int(text) == 0:
            self.faults.append(f"option {name!r} must be a whole number above 0, not {text!r}")
            return None
        return int(text)

    def start_ts(self) -> int | None:
        """Where to start, exclusive; by the names of Delta's change feed it is inclusive."""
        self._only_one("startTs", "startingVersion", "startingTimestamp")
        if (start_ts := self.timestamp("startTs")) is not None:
            return start_ts
        first_ts = self._version("startingVersion")
        if first_ts is None:
            first_ts = self.timestamp("startingTimestamp")
        return None if first_ts is None else max(first_ts - 1, 0)

    def end_ts(self) -> int | None:
        """Where to end, inclusive; a time of Delta's change feed takes all of its millisecond."""
        self._only_one("endTs", "endingVersion", "endingTimestamp")
        last_ts = self.timestamp("endingTimestamp")
        if last_ts is not None:
            return last_ts | (1 << LOGICAL_BITS) - 1
        end_ts = self.timestamp("endTs")
        return self._version("endingVersion") if end_ts is None else end_ts

    def _version(self, name: str) -> int | None:
        text = self._texts.get(name)
        if text is None:
            return None
        if not text.isdecimal():
            self.faults.append(f"option {name!r} must be a TSO, such as a _commit_ts, not {text!r}")
            return None
        return int(text)

    def _only_one(self, *names: str) -> None:
        given = [name for name in names if name in self._texts]
        if len(given) > 1:
            self.faults.append(f"give only one of {', '.join(map(repr, given))}")

    def timestamp(self, name: str) -> int | None:
        """A TSO, or the first TSO of a time's millisecond; a time without a zone is UTC."""
        text = self._texts.get(name)
        if text is None:
            return None
        if text.isdecimal():
            return int(text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.faults.append(f"option {name!r} must be a TSO or an ISO 8601 time, not {text!r}")
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000) << LOGICAL_BITS


def _unknown(key: str, spelling: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key, spelling, n=1)
    helps = f"did you mean {spelling[near[0]]!r}?" if near else f"they are {', '.join(NAMES)}"
    return f"unknown option {key!r}, {helps}"
