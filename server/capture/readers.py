"""Several readers of one changefeed, each with a position of its own. Pure but for a lock.

A reader that has a name is added to the changefeed, and holds its changes until it has them: the
checkpoint is that of the slowest. The one without a name is the changefeed's lake job, or the only
reader where none has a name.

Invariant: of each reader two acknowledgements are kept, and the changefeed is acknowledged up to
the former of the slowest. So what a reader took last can be given to it once more, as it is where
there is one reader: the sink keeps what is above the acknowledgement before the last.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from storage.model.errors import InvalidError, NotFoundError

_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_NAME_CHARACTERS_MAX: Final = 64
READERS_MAX: Final = 32
UNNAMED: Final = ""


class ReaderNotExistsError(NotFoundError):
    """The changefeed has no reader of that name, or none without a name."""

    code = "ErrReaderNotExists"


class ReaderInvalidError(InvalidError):
    """A reader cannot have that name, or is one too many; or it asks for what no reader may."""

    code = "ErrReaderInvalid"


def check_reader_name(name: str) -> None:
    """Refuse what cannot be part of a key.

    Raises:
        ReaderInvalidError: with the rule.
    """
    if len(name) > _NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise ReaderInvalidError(
            f"{name[:_NAME_CHARACTERS_MAX]!r} cannot be a reader's name: letters and digits, with "
            f"single hyphens between, at most {_NAME_CHARACTERS_MAX}"
        )


@dataclass(frozen=True, slots=True)
class _Position:
    """The last two acknowledgements of a reader."""

    previous_ts: int
    last_ts: int

    def acknowledged(self, ts: int) -> "_Position":
        # Said again, it is idle: nobody will take the changes before it once more.
        return _Position(self.last_ts, max(ts, self.last_ts))


class Readers:
    """The readers of one changefeed; for any thread."""

    def __init__(self, named: Mapping[str, int], checkpoint_ts: int, *, has_lake_job: bool) -> None:
        """`named` are positions as the metadata has them: they may be behind the checkpoint, as
        they are saved a little later than they move.
        """
        self._lock = threading.Lock()
        self._has_lake_job = has_lake_job
        self._positions = {name: _at(max(ts, checkpoint_ts)) for name, ts in named.items()}
        self._unnamed = _at(checkpoint_ts)
        self._saved = dict(named)

    def __bool__(self) -> bool:
        """Whether any reader has a name."""
        return bool(self._positions)

    def named(self) -> dict[str, int]:
        """The positions of those that have one, by name."""
        with self._lock:
            return {name: each.last_ts for name, each in sorted(self._positions.items())}

    def position(self, name: str) -> int:
        """Up to where a reader has the changes.

        Raises:
            ReaderNotExistsError: there is none of that name.
        """
        with self._lock:
            self._check(name)
            return self._positions[name].last_ts

    def add(self, name: str, checkpoint_ts: int) -> None:
        """One more, which begins at the checkpoint; one that is there stays as it is.

        Raises:
            ReaderInvalidError: the name, or there are too many.
        """
        check_reader_name(name)
        with self._lock:
            if len(self._positions) >= READERS_MAX and name not in self._positions:
                raise ReaderInvalidError(f"a changefeed has at most {READERS_MAX} readers")
            self._positions.setdefault(name, _at(checkpoint_ts))

    def remove(self, name: str) -> None:
        """Forget one: it holds nothing any more.

        Raises:
            ReaderNotExistsError: there is none of that name.
        """
        with self._lock:
            self._check(name)
            del self._positions[name]
            self._saved.pop(name, None)

    def acknowledged(self, name: str, ts: int) -> int:
        """A reader has everything up to `ts`; returns up to where all have it.

        Raises:
            ReaderNotExistsError: it is not one of the changefeed's.
        """
        with self._lock:
            if name == UNNAMED and not self._positions:
                self._unnamed = self._unnamed.acknowledged(ts)
                return ts
            if name == UNNAMED and self._has_lake_job:
                self._unnamed = self._unnamed.acknowledged(ts)
            else:
                self._check(name)
                self._positions[name] = self._positions[name].acknowledged(ts)
            counted = [*self._positions.values(), *([self._unnamed] if self._has_lake_job else [])]
            return min(each.previous_ts for each in counted)

    def restart_at(self, ts: int) -> None:
        """All go on there: the changefeed's checkpoint was moved."""
        with self._lock:
            self._positions = dict.fromkeys(self._positions, _at(ts))
            self._unnamed = _at(ts)

    def unsaved(self) -> dict[str, int]:
        """The positions that have moved since they were last saved."""
        with self._lock:
            return {
                name: each.last_ts
                for name, each in self._positions.items()
                if self._saved.get(name) != each.last_ts
            }

    def saved(self, positions: Mapping[str, int]) -> None:
        """These positions are durable."""
        with self._lock:
            self._saved |= {name: ts for name, ts in positions.items() if name in self._positions}

    def _check(self, name: str) -> None:
        if name in self._positions:
            return
        names = ", ".join(sorted(self._positions)) or "none with a name"
        raise ReaderNotExistsError(
            f"the changefeed has no reader {name!r}; it has {names}. Add it by `tidemark cli "
            "changefeed add-reader`"
            if name
            else f"this changefeed has the readers {names}: say which one this is (option reader)"
        )


def _at(ts: int) -> _Position:
    return _Position(ts, ts)
