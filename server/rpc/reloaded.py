"""Values made from files, and made again when the files have changed."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog
from prometheus_client import Counter

from storage.model.errors import TidemarkError

_LOOK_EVERY_S: Final = 1.0
T = TypeVar("T")

_log = structlog.get_logger(__name__)
_last_told: dict[str, str] = {}
"""The last line of each file: several listeners and channels read the same ones."""


class Reloaded(Generic[T]):
    """The latest value of `make`, which reads files; for any thread.

    Files that cannot be used, such as half-written ones, change nothing: the log says so, and what
    was made before stays. `reloads` counts by outcome, `ok` or `failed`; `what` names the files in
    the log.
    """

    def __init__(
        self, paths: Sequence[str], make: Callable[[], T], reloads: Counter, what: str
    ) -> None:
        """Make it once; raises what `make` raises."""
        self._paths = list(paths)
        self._make = make
        self._reloads = reloads
        self._what = what
        self._lock = threading.Lock()
        self._seen = self._state()
        self._looked_s = time.monotonic()
        self._made = make()
        self.version = 0
        """The number of times that it was made again."""

    def current(self) -> T:
        """The latest that could be used; files are looked at once a second at most."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s < _LOOK_EVERY_S:
                return self._made
            self._looked_s = now_s
            state = self._state()
            if state != self._seen:
                self._seen = state
                self._reload()
            return self._made

    def _reload(self) -> None:
        try:
            self._made = self._make()
            self.version += 1
        except TidemarkError as err:
            self._reloads.labels("failed").inc()
            # Of several files one may be written after the other: the next change tries again.
            if self._is_news(f"{self._seen} {err}"):
                _log.warning(f"{self._what} changed and cannot be used; it stays", reason=str(err))
        else:
            self._reloads.labels("ok").inc()
            if self._is_news(f"{self._seen}"):
                _log.info(f"{self._what} was read again", file=self._paths[0])

    def _is_news(self, line: str) -> bool:
        """Whether nobody else in this process has said so of these files."""
        name = f"{self._what} {self._paths}"
        before = _last_told.get(name)
        _last_told[name] = line
        return before != line

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(path) for path in self._paths if path]


def _state_of(path: str) -> tuple[int, int, int] | None:
    # Kubernetes and cert-manager replace a link, editors the file, others write into it: one of
    # these changes each time.
    try:
        state = Path(path).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
