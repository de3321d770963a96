"""Which server's log is read, and whether it is still the log that was read.

A server may begin its log anew (RESET MASTER, or another server under its name): it gives names of
files, offsets and GTIDs out again, and would go on behind a GTID that is another transaction now,
so that those before it are never read. So a changefeed keeps the name of the server that it reads.
Where that one is opened again, the place that was reached must be in its log still, behind the
GTIDs that were read. Of a MySQL only the place is compared: it does not tell the GTIDs of a place.

It happens while we are connected, too: the server keeps the connection, sends heartbeats, and
nothing of the new log. `StandstillCheck` finds that its log goes on, and has it opened again.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from server.changefeed import keys
from server.changefeed.source import Address
from server.puller.mysql.log.position import FIRST_POSITION, JsonRecord, SavedPosition
from server.puller.mysql.session.connection import Session, log_in_to
from server.puller.mysql.session.errors import (
    LogRefusedError,
    MySqlPrivilegeError,
    MySqlStatementError,
    MySqlUnavailableError,
    behind,
)
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.transaction.scanner import Place, is_before
from storage.meta.meta import Meta
from storage.mysql.gtid import MariaGtidSet

LOOK_EVERY_S: Final = 5.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadServer(JsonRecord):
    """The server that was read last: saved positions from `since_ts` on are places of its log."""

    what = "which MySQL server was read"

    name: str
    since_ts: int


class ReadServerRecord:
    """The server that a changefeed reads, in the metadata; `known` is what was loaded or noted."""

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self.known: ReadServer | None = None
        self._meta = meta
        self._key = keys.source(changefeed) + b"server"

    async def load(self) -> None:
        """Load it.

        Raises:
            CorruptError, MetaUnavailableError: it cannot be read.
        """
        pair = await self._meta.get(self._key)
        self.known = ReadServer.from_json(pair.value) if pair else None

    async def note(self, name: str, since_ts: int) -> None:
        """The server of this name is read, and saved positions from `since_ts` on are places of its
        log. Durable, before any of them is saved.
        """
        if self.known is None or self.known.name != name:
            self.known = ReadServer(name, since_ts)
            await self._meta.put(self._key, self.known.to_json())


def name_of(session: Session) -> str:
    """The name by which a server is recognized; a replica has another one."""
    if session.flavor.is_mariadb:
        return "{}@{}:{}".format(*session.row("SELECT @@server_id, @@hostname, @@port"))
    return str(session.row("SELECT @@server_uuid")[0])


def check_same_log(
    name: str, address: Address, options: MySqlOptions, reached: SavedPosition, read: ReadServer
) -> None:
    """See that the server of this name and address, if it was read before, still has the log that
    was read; blocks.

    Raises:
        LogBehindError: it has begun its log anew since, or lost its end.
    """
    if read.name != name or reached.ts < read.since_ts:
        return
    try:
        # On a session of its own: a MariaDB before 11.4 reads the file up to the place, which may
        # take longer than an answer may. Behind one address there may be several servers.
        with log_in_to(address, options) as asking:
            why = _difference(asking, reached) if name_of(asking) == name else ""
    except (MySqlUnavailableError, MySqlPrivilegeError, MySqlStatementError) as err:
        _log.warning("whether the server has begun its log anew is not known", error=err.message)
        return
    if why:
        raise behind(
            f"(the server has another log than was read up to {reached.file}:{reached.position}: "
            f"{why}; RESET MASTER, another server under its name, or a crash that took its end)"
        )


def _difference(session: Session, reached: SavedPosition) -> str:
    """Why the server's log is not the one that was read; nothing if it may be."""
    ends = {str(row[0]): int(row[1]) for row in session.execute("SHOW BINARY LOGS")}
    place: Place = (reached.file, reached.position)
    if all(is_before(end, place) for end in ends.items()):
        return "it ends before that"
    # Of a file that is gone the server's own refusal is what there is. A place at the beginning of
    # a file is where the server began to send, not what was reached.
    if (
        reached.file not in ends
        or reached.position <= FIRST_POSITION
        or not session.flavor.is_mariadb
    ):
        return ""
    gtids = session.row("SELECT BINLOG_GTID_POS(%s, %s)", place)[0]
    if gtids is None:
        # Either no event ends there, or one before it is larger than max_allowed_packet is now,
        # which that function does not read.
        return "" if _is_end_of_event(session, place) else "no event ends there"
    return f"{gtids} is there, not {reached.gtids}" if _differ(reached.gtids, str(gtids)) else ""


def _is_end_of_event(session: Session, place: Place) -> bool:
    try:
        session.execute("SHOW BINLOG EVENTS IN %s FROM %s LIMIT 1", place)
    except LogRefusedError:
        return False
    return True


def _differ(mine: str, theirs: str) -> bool:
    """Whether a domain of both has another GTID; the domains of one alone may be forgotten."""
    others = MariaGtidSet.parse(theirs).positions
    return any(
        domain in others and others[domain] != gtid
        for domain, gtid in MariaGtidSet.parse(mine).positions.items()
    )


class StandstillCheck:
    """Whether a server's log goes on while nothing of it comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end: Place | None = None
        self._goes_on = False
        self._next_at = 0.0
        self.note_arrival()

    def note_arrival(self) -> None:
        """Note that something of the log has arrived."""
        self._end, self._goes_on = None, False
        self._next_at = self._clock() + LOOK_EVERY_S

    async def look(self, log_end: Callable[[], Awaitable[Place]]) -> None:
        """Called when nothing has come since the last call; asks the server where its log ends, now
        and then.

        Raises:
            MySqlUnavailableError: it went on, and nothing of that came in `LOOK_EVERY_S`.
        """
        if self._clock() < self._next_at:
            return
        if self._goes_on:
            raise MySqlUnavailableError(
                "the server's log goes on, and nothing of it comes: it may have been begun anew "
                "(RESET MASTER)"
            )
        try:
            end = await log_end()
        except (MySqlPrivilegeError, MySqlStatementError):
            self.note_arrival()  # nobody may ask
            return
        self._goes_on = self._end not in (None, end)
        self._end = end
        self._next_at = self._clock() + LOOK_EVERY_S
