"""Reports the lake job to the captures: `ready` every ten seconds, the error that ends it,
and that it was stopped; and, while no cut comes, how far the lake is.

A report must never hold a cut up or fail one: it has one try of a few seconds, in a thread of its
own while the job runs. Captures of an older version know no reports: the job then stops sending
them.
"""

import logging
import threading
from typing import Final

from pyspark_tidemark.errors import MOVED_BACK, SourceError
from pyspark_tidemark.flight import ACK_AGAIN_S, Changefeed

EVERY_S: Final = ACK_AGAIN_S
_CHANGEFEED_CODES: Final = frozenset(
    {
        MOVED_BACK,
        "ErrChangefeedFailed",
        "ErrChangefeedNotRunning",
        "ErrChangeFeedNotExists",
        "ErrNotOwner",
        "ErrUnauthenticated",
        "ErrUnauthorized",
    }
)
"""Errors that come from the captures themselves: they are not reported back."""

_logger = logging.getLogger(__name__)


class Reporter:
    """The reports of one run of the job."""

    def __init__(self, changefeed: Changefeed, every_s: float = EVERY_S) -> None:
        self._changefeed = changefeed
        self._every_s = every_s
        self._cut_ts = 0
        self._commits = self._ui = ""
        self._applied = threading.Event()
        self._ended = threading.Event()
        self._understood = True
        self.failure: SourceError | None = None
        """What the job has to end by."""
        self._thread = threading.Thread(target=self._run, name="job-reports", daemon=True)

    def start(self, cut_ts: int = 0, commits: str = "", ui: str = "") -> None:
        """Begin to report; the lake is at `cut_ts` already (0: it is empty), `commits` is what it
        commits in one step (`Manifest.commits`), and `ui` the address of Spark's web UI, if any.
        """
        self._cut_ts, self._commits, self._ui = cut_ts, commits, ui
        self._thread.start()

    def applied(self, cut_ts: int) -> None:
        """Note a cut that is in the lake; the job is `ready` from the first one on."""
        # Not before: an error may end each start of the job at its first cut.
        self._cut_ts = cut_ts
        self._applied.set()

    def stopped(self) -> None:
        """Report that the job ends on purpose."""
        self._end()
        self._report("stopped")

    def failed(self, error: SourceError) -> None:
        """Report the error that ends the job."""
        self._end()
        if error.code not in _CHANGEFEED_CODES:
            self._report("retrying" if error.retryable else "failed", error)

    def _end(self) -> None:
        self._ended.set()
        self._applied.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._repeat()
        except SourceError as err:
            self.failure = err

    def _repeat(self) -> None:
        """Raises SourceError: ErrChangefeedMovedBack."""
        last_ts = 0
        while not self._ended.is_set():
            is_ready, cut_ts = self._applied.is_set(), self._cut_ts
            if is_ready:
                self._report("ready")
            # A capture may die before it has kept an acknowledgement, and an idle job has no other
            # one to give: so it repeats the last one.
            if cut_ts and cut_ts == last_ts:
                self._changefeed.ack_again(cut_ts)
            last_ts = cut_ts
            (self._ended if is_ready else self._applied).wait(self._every_s)

    def _report(self, state: str, error: SourceError | None = None) -> None:
        if not self._understood:
            return
        try:
            self._changefeed.report(state, self._cut_ts, error, self._commits, self._ui)
        except Exception as err:  # noqa: BLE001 - whatever a capture answers, the job goes on, or ends by its own error
            self._understood = getattr(err, "code", "") != "ErrFlightRequestInvalid"
            _logger.warning("the captures could not be told that the job is %s: %s", state, err)
