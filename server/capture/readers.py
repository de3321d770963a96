"""Several readers of one changefeed, each with a position of its own.

A named reader is added to the changefeed and holds the changes until it has acknowledged them: the
checkpoint is the position of the slowest reader. The reader without a name is the changefeed's lake
job, or the only reader if none has a name.

A reader may begin below the checkpoint, in history that is kept (`sink.retention`). A reader that
is silent for too long lets go: it holds nothing, so the checkpoint may pass it. Both are `behind`.

Invariants:
1. The last two acknowledgements of each reader are kept, and the changefeed is acknowledged up to
   the slowest reader's last but one. So a reader can read its last range again, as it can where it
   is the only reader: the sink keeps what is above the last acknowledgement but one.
2. The position of a reader that is behind is never moved up to the checkpoint, since it has yet to
   read what lies between. If that is gone, the reader gets an error.
3. At least one reader holds.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from storage.model.errors import CorruptError, InvalidError, NotFoundError
from storage.model.ts import MAX_TS

_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_NAME_CHARACTERS_MAX: Final = 64
READERS_MAX: Final = 32
UNNAMED: Final = ""


class ReaderNotExistsError(NotFoundError):
    """The changefeed has no reader of that name, or none without a name."""

    code = "ErrReaderNotExists"


class ReaderInvalidError(InvalidError):
    """A reader's name is not allowed, there are too many readers, or a reader's request is not."""

    code = "ErrReaderInvalid"


def check_reader_name(name: str) -> None:
    """Refuse a name that cannot be part of a key.

    Raises:
        ReaderInvalidError: with the rule.
    """
    if len(name) > _NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise ReaderInvalidError(
            f"{name[:_NAME_CHARACTERS_MAX]!r} cannot be a reader's name: letters and digits, with "
            f"single hyphens between, at most {_NAME_CHARACTERS_MAX}"
        )


HOLDING, LET_GO, LOST = READER_STATES = ("holding", "let go", "lost")
_GRACE_S: Final = 600.0
"""For this many seconds after a start no reader is dropped, since none could connect before."""
_SEEN_AGAIN_S: Final = 60.0
"""A reader's silence must grow by this many seconds before it is saved again while its position
stays the same.
"""


@dataclass(frozen=True, slots=True)
class ReaderRecord:
    """A reader as the metadata has it."""

    ts: int
    behind: bool = False
    """The reader is below the checkpoint and still needs the changes in between."""
    seen_s: float = 0.0
    """The Unix time of its last acknowledgement; 0: not known."""

    def to_json(self) -> bytes:
        """Return the value of its record; fields unknown to earlier versions are left out where
        they are empty.
        """
        more = ({"behind": True} if self.behind else {}) | (
            {"seen_s": int(self.seen_s)} if self.seen_s else {}
        )
        return json.dumps({"checkpoint_ts": self.ts} | more).encode()

    @classmethod
    def from_json(cls, value: bytes) -> "ReaderRecord":
        """Read what `to_json` wrote, or an earlier version; raises CorruptError."""
        try:
            doc = json.loads(value)
            ts, behind = int(doc["checkpoint_ts"]), bool(doc.get("behind", False))
            return cls(ts, behind, float(doc.get("seen_s", 0)))
        except (TypeError, ValueError, KeyError, RecursionError) as err:
            raise CorruptError(
                f"a reader's record in the metadata cannot be read: {err!r}"
            ) from err


@dataclass(frozen=True, slots=True)
class ReaderState:
    """A reader as it is shown."""

    name: str
    checkpoint_ts: int
    state: str
    """`HOLDING`, `LET_GO` or `LOST`."""
    silent_s: float


@dataclass(frozen=True, slots=True)
class KeptRange:
    """The position of the changefeed when a reader acknowledges."""

    checkpoint_ts: int = 0
    kept_ts: int = 0
    """Rows above this ts can be read."""


@dataclass(slots=True)
class _Reader:
    """The position of one reader. Not thread-safe: calls must not overlap."""

    previous_ts: int
    last_ts: int
    seen_s: float
    """The monotonic clock's time of its last acknowledgement."""
    behind: bool = False
    has_let_go: bool = False

    def acknowledged(self, ts: int, now_s: float) -> None:
        # A reader that acknowledges the same ts again is idle, and will not read its last range
        # again: then both positions are the same.
        self.previous_ts, self.last_ts = self.last_ts, max(ts, self.last_ts)
        self.seen_s = now_s


class Readers:
    """The readers of one changefeed; for any thread.

    Times are the monotonic clock's: one of the wall would let all readers go when it jumps.
    """

    def __init__(
        self,
        named: Mapping[str, ReaderRecord],
        checkpoint_ts: int,
        *,
        has_lake_job: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`named` as the metadata has them: positions may be behind the checkpoint, as they are
        saved a little later than they move.
        """
        self._lock = threading.Lock()
        self._has_lake_job = has_lake_job
        self._clock = clock
        self._since_s = now_s = clock()
        unix_s = time.time()
        self._readers: dict[str, _Reader] = {}
        for name, record in named.items():
            behind = record.behind and record.ts < checkpoint_ts
            ts = record.ts if behind else max(record.ts, checkpoint_ts)
            silent_s = max(0.0, unix_s - record.seen_s) if record.seen_s else 0.0
            self._readers[name] = _Reader(ts, ts, now_s - silent_s, behind)
        self._unnamed = _Reader(checkpoint_ts, checkpoint_ts, now_s)
        self._saved = dict(named)

    def __bool__(self) -> bool:
        """Whether there is any named reader."""
        return bool(self._readers)

    def named(self) -> dict[str, int]:
        """The positions of those that have one, by name."""
        with self._lock:
            return {name: each.last_ts for name, each in sorted(self._readers.items())}

    def states(self, kept_ts: int = 0) -> list[ReaderState]:
        """Return the named readers as they are shown, given that rows above `kept_ts`
        can be read.
        """
        now_s = self._clock()
        with self._lock:
            return [
                ReaderState(
                    name,
                    each.last_ts,
                    _state(each, kept_ts),
                    max(0.0, now_s - each.seen_s),
                )
                for name, each in sorted(self._readers.items())
            ]

    def position(self, name: str) -> int:
        """Return the ts up to which a reader has the changes.

        Raises:
            ReaderNotExistsError: there is none of that name.
        """
        with self._lock:
            self._check(name)
            return self._readers[name].last_ts

    def record(self, name: str) -> ReaderRecord:
        """Return the record of a reader to be saved; raises as `position`."""
        with self._lock:
            self._check(name)
            return self._record(self._readers[name])

    def begins_at(self, name: str, checkpoint_ts: int) -> int:
        """Return the ts from which a reader continues; raises as `position`."""
        with self._lock:
            self._check(name)
            reader = self._readers[name]
            return reader.last_ts if reader.behind else max(reader.last_ts, checkpoint_ts)

    def add(self, name: str, ts: int, checkpoint_ts: int) -> None:
        """One more, which begins at `ts`; one that is there stays as it is.

        Raises:
            ReaderInvalidError: the name, or there are too many.
        """
        check_reader_name(name)
        with self._lock:
            if len(self._readers) >= READERS_MAX and name not in self._readers:
                raise ReaderInvalidError(f"a changefeed has at most {READERS_MAX} readers")
            reader = _Reader(ts, ts, self._clock(), behind=ts < checkpoint_ts)
            self._readers.setdefault(name, reader)

    def remove(self, name: str) -> None:
        """Forget one: it holds nothing any more.

        Raises:
            ReaderNotExistsError: there is none of that name.
        """
        with self._lock:
            self._check(name)
            del self._readers[name]
            self._saved.pop(name, None)

    def acknowledged(self, name: str, ts: int, kept: KeptRange = KeptRange()) -> int:
        """A reader has everything up to `ts`; returns up to where all that hold have it.

        Raises:
            ReaderNotExistsError: it is not one of the changefeed's.
        """
        now_s = self._clock()
        with self._lock:
            if name == UNNAMED and not self._readers:
                self._unnamed.acknowledged(ts, now_s)
                return ts
            if name == UNNAMED and self._has_lake_job:
                self._unnamed.acknowledged(ts, now_s)
            else:
                self._check(name)
                self._come_back(self._readers[name], ts, now_s, kept)
            return self._agreed_ts()

    def agreed_ts(self) -> int:
        """Return the ts up to which all readers that hold the checkpoint have everything."""
        with self._lock:
            return self._agreed_ts()

    def held_ts(self) -> int:
        """Return the highest ts such that no named reader that holds history needs it or anything
        below; MAX_TS without any.
        """
        with self._lock:
            holding = (each.previous_ts for each in self._readers.values() if not each.has_let_go)
            return min(holding, default=MAX_TS)

    def let_go(self, ttl_s: float, kept_ts: int) -> list[str]:
        """Stop keeping history for readers that have been silent for `ttl_s`, and for those whose
        next changes are gone, as only changes above `kept_ts` can be read; returns their names.
        """
        now_s, grace_s, gone = self._clock(), min(_GRACE_S, ttl_s), []
        with self._lock:
            # The longest silent first: the last one that is left goes on to hold.
            by_silence = sorted(self._readers.items(), key=lambda pair: pair[1].seen_s)
            for name, reader in by_silence:
                is_silent = now_s >= max(reader.seen_s + ttl_s, self._since_s + grace_s)
                is_due = is_silent or (reader.behind and reader.last_ts < kept_ts)
                if is_due and not reader.has_let_go and len(self._holding()) > 1:
                    # Before anybody acknowledges more: where it is stays known over a restart.
                    reader.behind = reader.has_let_go = True
                    gone.append(name)
        return gone

    def restart_at(self, ts: int) -> None:
        """All go on there: the changefeed's checkpoint was moved."""
        now_s = self._clock()
        with self._lock:
            self._since_s = now_s
            self._readers = {
                name: _Reader(ts, ts, each.seen_s) for name, each in self._readers.items()
            }
            self._unnamed = _Reader(ts, ts, now_s)

    def unsaved(self) -> dict[str, ReaderRecord]:
        """Return the records that have changed since they were last saved."""
        with self._lock:
            records = {name: self._record(each) for name, each in self._readers.items()}
            return {
                name: record
                for name, record in records.items()
                if _is_news(self._saved.get(name), record)
            }

    def saved(self, records: Mapping[str, ReaderRecord]) -> None:
        """These are durable."""
        with self._lock:
            self._saved |= {name: each for name, each in records.items() if name in self._readers}

    def _record(self, reader: _Reader) -> ReaderRecord:
        silent_s = self._clock() - reader.seen_s
        return ReaderRecord(reader.last_ts, reader.behind, time.time() - silent_s)

    def _come_back(self, reader: _Reader, ts: int, now_s: float, kept: KeptRange) -> None:
        reader.acknowledged(ts, now_s)
        if reader.has_let_go and reader.last_ts >= kept.kept_ts:
            reader.has_let_go = False
            # What it took last may be gone.
            reader.previous_ts = reader.last_ts
        if reader.previous_ts >= kept.checkpoint_ts and not reader.has_let_go:
            reader.behind = False

    def _agreed_ts(self) -> int:
        return min(each.previous_ts for each in self._holding())

    def _holding(self) -> list[_Reader]:
        """Return the readers that the checkpoint waits for."""
        holding = [each for each in self._readers.values() if not each.has_let_go]
        return [*holding, self._unnamed] if self._has_lake_job else holding

    def _check(self, name: str) -> None:
        if name in self._readers:
            return
        names = ", ".join(sorted(self._readers)) or "none with a name"
        raise ReaderNotExistsError(
            f"the changefeed has no reader {name!r}; it has {names}. Add it by `tidemark cli "
            "changefeed add-reader`"
            if name
            else f"this changefeed has the readers {names}: say which one this is (option reader)"
        )


def _state(reader: _Reader, kept_ts: int) -> str:
    if reader.last_ts < kept_ts and reader.behind:
        return LOST
    return LET_GO if reader.has_let_go else HOLDING


def _is_news(saved: ReaderRecord | None, record: ReaderRecord) -> bool:
    if saved is None or (saved.ts, saved.behind) != (record.ts, record.behind):
        return True
    return record.seen_s - saved.seen_s >= _SEEN_AGAIN_S
