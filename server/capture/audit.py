"""The result of auditing a changefeed's lake: its record in the metadata, and its view in
`changefeed query`. Pure.

The process of the lake's job writes it, a record a table, and removes the record when the lake is
right again; so does `tidemark cli verify` (docs/design/0030). The owner of the changefeeds shows
it.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Final

from pyspark_tidemark.lake.format import APPEND, UPSERT
from pyspark_tidemark.lake.registry import FORMATS
from pyspark_tidemark.sink_uri import settings_of

from server.capture.errors import AuditUnsupportedError, ParameterError
from server.changefeed.info import ChangefeedInfo, RunningError, State, lake_format
from storage.model.errors import CorruptError

DIFFERS: Final = "ErrAuditDiffers"
PERIOD_S_MIN, PERIOD_S_MAX = 60, 90 * 86_400
_SPANS_MAX: Final = 20
_TABLES_SHOWN: Final = 3
_SPANS_SHOWN: Final = 3

Span = tuple[int | None, int | None]
"""A range of keys `[first, second)`; None: unbounded on that side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A table of a lake that differs from its source."""

    table: str
    ts: int
    """The lake's cut at which it was compared."""
    time: str
    """RFC 3339, UTC."""
    mode: str = UPSERT
    """The lake's mode; only `upsert` can be repaired in place."""
    column: str = ""
    """The key column that the ranges divide; empty: the table was compared whole."""
    spans: tuple[Span, ...] = ()
    """The ranges in which rows differ; the first of them."""
    ranges: int = 1
    """The number of key ranges of the table."""

    def with_earlier_spans(self, before: "Finding | None") -> "Finding":
        """With the ranges of an earlier finding of the table, if they are of the same column."""
        if before is None or before.column != self.column:
            return self
        spans = (*self.spans, *(span for span in before.spans if span not in self.spans))
        again = len(self.spans) + len(before.spans) - len(spans)
        ranges = self.ranges + before.ranges - again
        ts = max(self.ts, before.ts)
        return replace(self, ts=ts, spans=spans[:_SPANS_MAX], ranges=max(ranges, 1))

    def to_json(self) -> bytes:
        """The value of its record."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> "Finding":
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            doc["spans"] = tuple((low, high) for low, high in doc["spans"])
            return cls(**doc)
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise CorruptError(
                f"what an audit found cannot be read in the metadata: {err!r}"
            ) from err

    def text(self, changefeed: str) -> str:
        """The table, its ranges, and what mends it."""
        where = f" ({self.column} {_shown(self.spans, self.ranges)})" if self.spans else ""
        verify = f"tidemark cli verify -c {changefeed} --table {shlex.quote(self.table)}"
        if self.mode != UPSERT:
            return (
                f"{self.table}{where}: `{verify}` tells the rows; a lake of mode {self.mode} is "
                "not repaired in place, write it anew with a new changefeed"
            )
        return f"{self.table}{where}: `{verify} --repair` mends it"


@dataclass(frozen=True, slots=True)
class Audit:
    """All that is known of a changefeed's audit."""

    findings: tuple[Finding, ...] = ()
    on_time: str = ""
    """The time at which everything due had been compared for the last time, RFC 3339;
    empty: never.
    """


def audit_error(info: ChangefeedInfo, audit: Audit) -> RunningError | None:
    """The error of a changefeed whose lake differs from its source; None:
    no difference is known.
    """
    if not audit.findings or not info.audit_s:
        return None
    newest = max(audit.findings, key=lambda each: each.time)
    findings = "; ".join(each.text(info.id) for each in audit.findings[:_TABLES_SHOWN])
    more = len(audit.findings) - _TABLES_SHOWN
    return RunningError(
        DIFFERS,
        "rows of the lake are not those of the source. "
        f"{findings}{f'; and {more} more tables' if more > 0 else ''}. Stop the lake's job before "
        f"--repair (`tidemark cli changefeed pause -c {info.id}` where `spark keep` or `up` runs "
        "it), and let it go on after it",
        newest.time,
    )


def audit_silence(info: ChangefeedInfo, audit: Audit, now: datetime) -> str:
    """Return the warning for an audit that has been late for its whole period; empty: there is
    none.
    """
    if not info.audit_s or info.state is not State.NORMAL:
        return ""
    try:
        silent_s = (now - datetime.fromisoformat(audit.on_time or info.create_time)).total_seconds()
    except (ValueError, TypeError):
        return ""
    if silent_s <= info.audit_s:
        return ""
    return (
        f"the audit is behind since {audit.on_time or 'it was asked for'}: the process of the "
        "lake's job does it (`tidemark spark run` or `keep`), which needs --coordinator, and "
        "gives way while the lake is behind; see its log"
    )


def check_audit(audit_s: int, sink_uri: str, *, ignores_events: bool = False) -> None:
    """Check that the lake can be audited, and in such a time; 0 means no audit.

    Raises:
        ParameterError: the time is too short or too long.
        AuditUnsupportedError: the sink has no rows that could be compared.
    """
    if audit_s == 0:
        return
    if not PERIOD_S_MIN <= audit_s <= PERIOD_S_MAX:
        raise ParameterError(
            f"--audit is {PERIOD_S_MIN // 60}m to {PERIOD_S_MAX // 3600}h, not {audit_s} s"
        )
    lake = lake_format(sink_uri)
    kind = f"{sink_uri.partition(':')[0]}://"
    if not lake:
        why = f"a sink {kind} is kept by a reader of its own"
    elif UPSERT not in FORMATS[lake].modes:
        why = f"a sink {kind} is a changelog, which has no current rows"
    elif settings_of(sink_uri).get("mode") == APPEND:
        why = "mode=append keeps all changes, and no current rows"
    elif ignores_events:
        why = "the changefeed's event filters leave changes out of it"
    else:
        return
    raise AuditUnsupportedError(f"--audit compares the rows of a lake, and {why}: leave it out")


def _shown(spans: Sequence[Span], ranges: int) -> str:
    shown = [_range(span) for span in spans[:_SPANS_SHOWN]]
    more = ranges - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more > 0 else "")


def _range(span: Span) -> str:
    low, high = span
    if low is None:
        return "all" if high is None else f"below {high}"
    return f"from {low}" if high is None else f"from {low} to below {high}"
