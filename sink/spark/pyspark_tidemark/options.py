"""The options of `format("tidemark")`: parsed once, checked whole, unknown ones refused with the nearest name."""

import dataclasses
import difflib
from collections.abc import Mapping
from datetime import UTC, datetime

from pyspark_tidemark.errors import SourceError

NAMES = (
    "endpoint", "changefeed", "table", "cuts", "startTs", "endTs", "maxRowsPerTrigger", "ack", "waitMs",
    "caPath", "certPath", "keyPath",
)  # fmt: skip
_LOGICAL_BITS = 18
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclasses.dataclass(frozen=True)
class Tls:
    """Paths of PEM files; with none of them the connection is plaintext."""

    ca_path: str = ""
    cert_path: str = ""
    key_path: str = ""

    @property
    def enabled(self) -> bool:
        """Whether the connection is encrypted."""
        return bool(self.ca_path or self.cert_path or self.key_path)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to read, from where; timestamps are TSO (milliseconds << 18 | counter)."""

    endpoints: tuple[str, ...]
    """Flight addresses of captures, `grpc://host:port`; any of them answers for the whole changefeed."""
    changefeed: str
    table: str | None = None
    """`database.table`; None in cuts mode."""
    start_ts: int | None = None
    """Exclusive; None means the changefeed's checkpoint_ts."""
    end_ts: int | None = None
    """Inclusive; None means no end (stream) or what is resolved now (batch)."""
    max_rows: int | None = None
    """Admission limit of one micro-batch; one commit_ts is never split, so a batch may be larger."""
    ack: bool = True
    """Whether Spark's commit of a batch moves the changefeed's checkpoint."""
    wait_ms: int = 200
    """How long the server may hold a poll that finds nothing new."""
    tls: Tls = Tls()


def parse(given: Mapping[str, str]) -> Options:
    """Check and type the options of one reader; names are case-insensitive.

    Raises:
        SourceError: ErrOptionInvalid, naming every fault.
    """
    known = {name.lower(): name for name in NAMES}
    values = {key.lower(): value for key, value in given.items()}
    faults = [_unknown(key) for key in values if key not in known]
    texts = {known[key]: value for key, value in values.items() if key in known}
    cuts = _boolean("cuts", texts.get("cuts", "false"), faults)
    faults += [f"option {name!r} is missing" for name in ("endpoint", "changefeed") if not texts.get(name)]
    if cuts == bool(texts.get("table")):
        faults.append("give option 'table' as database.table, or 'cuts' as true, and not both")
    options = Options(
        endpoints=tuple(part.strip() for part in texts.get("endpoint", "").split(",") if part.strip()),
        changefeed=texts.get("changefeed", ""),
        table=texts.get("table") or None,
        start_ts=_timestamp("startTs", texts, faults),
        end_ts=_timestamp("endTs", texts, faults),
        max_rows=_positive("maxRowsPerTrigger", texts, faults),
        ack=_boolean("ack", texts.get("ack", "true"), faults),
        wait_ms=_positive("waitMs", texts, faults) or Options.wait_ms,
        tls=Tls(texts.get("caPath", ""), texts.get("certPath", ""), texts.get("keyPath", "")),
    )
    if faults:
        raise SourceError("ErrOptionInvalid", "; ".join(faults))
    return options


def _unknown(key: str) -> str:
    by_lower = {name.lower(): name for name in NAMES}
    near = difflib.get_close_matches(key, by_lower, n=1, cutoff=0.0)[0]
    return f"unknown option {key!r}, did you mean {by_lower[near]!r}?"


def _boolean(name: str, text: str, faults: list[str]) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        faults.append(f"option {name!r} must be true or false, not {text!r}")
    return text.lower() in _TRUE


def _positive(name: str, texts: Mapping[str, str], faults: list[str]) -> int | None:
    text = texts.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        faults.append(f"option {name!r} must be a whole number above 0, not {text!r}")
        return None
    return int(text)


def _timestamp(name: str, texts: Mapping[str, str], faults: list[str]) -> int | None:
    text = texts.get(name)
    if text is None:
        return None
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        faults.append(f"option {name!r} must be a TSO or an ISO 8601 time, not {text!r}")
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000) << _LOGICAL_BITS
