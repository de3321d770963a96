"""Values made from files, such as certificates and access lists, and made again when the files
have changed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog
from prometheus_client import Counter, Gauge

from storage.model.errors import TidemarkError

_LOOK_EVERY_S: Final = 1.0
UNUSABLE = Gauge(
    "tidemark_rpc_files_unusable",
    "1 while files that were changed cannot be used, and what was read before is still in force",
    ["files"],
)
T = TypeVar("T")

_log = structlog.get_logger(__name__)
_last_logged: dict[str, str] = {}
"""The last line logged about each file: several listeners and channels read the same files."""


class Reloaded(Generic[T]):
    """The latest value of `make`, which reads files; thread-safe.

    Where changed files cannot be used, such as half-written ones, the former value stays, and a
    warning is logged. `reloads` counts by outcome, `ok` or `failed`; `what` names the files in the
    log.
    """

    def __init__(
        self, paths: Sequence[str], make: Callable[[], T], reloads: Counter, what: str
    ) -> None:
        """Call `make` once; raises what it raises."""
        self._paths = list(paths)
        self._make = make
        self._reloads = reloads
        self._what = what
        self._lock = threading.Lock()
        # Before `make`: a file that changes while it is read is read again.
        self._read_state = self._state()
        self._checked_s = time.monotonic()
        self._value = make()
        self.version = 0
        """The number of times that the value was made again."""

    def current(self) -> T:
        """The latest value; the files are checked for changes at most once a second."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._checked_s < _LOOK_EVERY_S:
                return self._value
            self._checked_s = now_s
            state = self._state()
            if state != self._read_state:
                self._read_state = state
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._make()
            self.version += 1
        except (TidemarkError, OSError) as err:
            # The second: a file went away between two looks at it.
            self._reloads.labels("failed").inc()
            UNUSABLE.labels(self._what).set(1)
            # Of several files one may be written after the other: the next change tries again.
            if self._is_new_line(f"{self._read_state} {err}"):
                _log.warning(f"{self._what} changed and cannot be used; it stays", reason=str(err))
        else:
            self._reloads.labels("ok").inc()
            UNUSABLE.labels(self._what).set(0)
            if self._is_new_line(f"{self._read_state}"):
                _log.info(f"{self._what} was read again", file=self._paths[0])

    def _is_new_line(self, line: str) -> bool:
        """Whether another reader of these files in this process has not logged it already."""
        name = f"{self._what} {self._paths}"
        before = _last_logged.get(name)
        _last_logged[name] = line
        return before != line

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_state_of(path) for path in self._paths if path]


def _state_of(path: str) -> tuple[int, int, int] | None:
    # Kubernetes and cert-manager replace a link, editors the file, others write into it: at least
    # one of the three numbers changes.
    try:
        state = Path(path).stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
