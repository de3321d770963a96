"""Which server's log is read, and whether it is still the log that was read.

A server may begin its log anew (RESET MASTER, or another server under its name): it gives names of
files, offsets and GTIDs out again, and would go on behind a GTID that is another transaction now,
so that those before it are never read. So a changefeed keeps the name of the server that it reads.
Where that one is opened again, the place that was reached must be in its log still, in a file that
was begun in the same second, and on MariaDB behind the GTIDs that were read. (MySQL does not tell
the GTIDs of a place.) Where another one is opened, the last GTID that was read must be the same
transaction there.

It happens while we are connected, too: the server keeps the connection, sends heartbeats, and
nothing of the new log. `StandstillCheck` finds that its log goes on, and has it opened again.
"""

from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from server.changefeed import keys
from server.changefeed.source import Address
from server.puller.mysql.log.position import FIRST_POSITION, JsonRecord, SavedPosition
from server.puller.mysql.log.stream import LogPlace, open_stream
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
from storage.model.errors import TidemarkError
from storage.mysql.control import MariaGtid
from storage.mysql.event import Events, EventType
from storage.mysql.gtid import MariaGtidSet

LOOK_EVERY_S: Final = 5.0
_TAKE_S: Final = 10.0
_ANONYMOUS_READER: Final = 0
"""The server's id for tools that read once: it evicts nobody."""
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


@dataclass(frozen=True, slots=True)
class NamedServer:
    """A server that answers, by its name; behind its address there may be several."""

    name: str
    address: Address
    options: MySqlOptions

    def log_in(self) -> Session | None:
        """A session with it; None: another server has answered. Raises as `log_in_to`."""
        session = log_in_to(self.address, self.options)
        if name_of(session) == self.name:
            return session
        session.close()
        return None

    def first_event(self, place: LogPlace, kind: EventType) -> Events | None:
        """The first event of a kind in its log from a place on; None: there is none.

        Raises:
            TidemarkError: its log cannot be read there.
        """
        session = self.log_in()
        if session is None:
            return None
        with closing(
            open_stream(session, place, self.options, _ANONYMOUS_READER, follow=False)
        ) as stream:
            while not stream.ended:
                for events in stream.take(_TAKE_S):
                    numbers = events.of(kind)
                    if len(numbers):
                        return events[int(numbers[0]) : int(numbers[0]) + 1]
        return None


def check_log(server: NamedServer, reached: SavedPosition, read: ReadServer | None) -> bool:
    """See that a server has the log that was read up to a place, as far as it tells; returns
    whether that is a place of its log. Blocks.

    Raises:
        LogBehindError: it has begun its log anew since, or lost its end, or is another server with
            another history.
    """
    if read is not None and read.name != server.name and not reached.gtids:
        raise behind(
            f"(another server answers, and without GTIDs its log has no place for what was read up "
            f"to {reached.file}:{reached.position})"
        )
    is_same = read is not None and read.name == server.name and reached.ts >= read.since_ts
    why = _look(server, reached, is_same=is_same)
    if why:
        raise behind(
            f"(the server has another log than was read up to {reached.file}:{reached.position}: "
            f"{why}; RESET MASTER, another server at its address, or a crash that took its end)"
        )
    return is_same


def _look(server: NamedServer, reached: SavedPosition, *, is_same: bool) -> str:
    """Why the server's log is not the one that was read; nothing if it may be."""
    try:
        # On a session of its own: a MariaDB before 11.4 reads the file up to the place, which may
        # take longer than an answer may.
        asking = server.log_in()
        if asking is None:
            return ""
        with asking:
            look = _difference if is_same else _other_history
            return look(asking, server, reached)
    except (MySqlUnavailableError, MySqlPrivilegeError, MySqlStatementError) as err:
        _log.warning("whether the server has begun its log anew is not known", error=err.message)
        return ""


def _other_history(session: Session, server: NamedServer, reached: SavedPosition) -> str:
    """Why another server's transactions are not those that were read.

    A MariaDB that has no transaction of a domain takes any GTID of it, and any two MariaDB servers
    give the same GTIDs: so the last one that was read must be of the same second there.
    """
    if not session.flavor.is_mariadb or reached.domains != 1:
        return ""
    ((domain, (author, seq)),) = MariaGtidSet.parse(reached.gtids).positions.items()
    logged, replicated = map(
        MariaGtidSet.parse, session.row("SELECT @@gtid_binlog_state, @@gtid_slave_pos")
    )
    # A replica without log_slave_updates goes on where it has replicated to.
    if domain not in logged.positions and replicated.positions.get(domain) != (author, seq):
        return f"it has no transactions of domain {domain}"
    if not reached.last_s:
        return ""
    before = LogPlace(f"{domain}-{author}-{seq - 1}" if seq > 1 else "")
    try:
        event = server.first_event(before, EventType.MARIADB_GTID)
    except TidemarkError as err:
        # Its log begins behind that transaction, or another server has written the one before it.
        _log.info("whether the server has the same transactions is not known", error=err.message)
        return ""
    if event is None:
        return ""
    gtid = MariaGtid.parse(event.header(0), event.body(0))
    if (gtid.domain, gtid.seq) != (domain, seq) or gtid.second == reached.last_s:
        return ""
    return f"{reached.gtids} was committed at {_utc(gtid.second)} there, not {_utc(reached.last_s)}"


def _difference(session: Session, server: NamedServer, reached: SavedPosition) -> str:
    """Why the log of the server that was read is not the one that was read; nothing if it may
    be.
    """
    ends = {str(row[0]): int(row[1]) for row in session.execute("SHOW BINARY LOGS")}
    place: Place = (reached.file, reached.position)
    if all(is_before(end, place) for end in ends.items()):
        return "it ends before that"
    if reached.file not in ends:
        return _difference_behind(session, next(iter(ends)), reached)
    if ends[reached.file] < reached.position:
        return "that file ends before that"
    if reached.file_began_s:
        event = server.first_event(LogPlace("", reached.file), EventType.FORMAT_DESCRIPTION)
        began_s = 0 if event is None else int(event.timestamps[0])
        if began_s not in (0, reached.file_began_s):
            return f"that file was begun at {_utc(began_s)}, not {_utc(reached.file_began_s)}"
    # A place at the beginning of a file of another server is where it began to send, not what was
    # reached.
    if reached.position <= FIRST_POSITION or not session.flavor.is_mariadb:
        return ""
    gtids = session.row("SELECT BINLOG_GTID_POS(%s, %s)", place)[0]
    if gtids is None:
        # Either no event ends there, or one before it is larger than max_allowed_packet is now,
        # which that function does not read.
        return "" if _is_end_of_event(session, place) else "no event ends there"
    return f"{gtids} is there, not {reached.gtids}" if _differ(reached.gtids, str(gtids)) else ""


def _difference_behind(session: Session, first: str, reached: SavedPosition) -> str:
    """The same where the file that was read is gone, and the log begins with the file `first`."""
    if not session.flavor.is_mariadb or is_before((first, 0), (reached.file, 0)):
        return ""
    gtids = str(session.row("SELECT BINLOG_GTID_POS(%s, %s)", (first, FIRST_POSITION))[0] or "")
    mine = MariaGtidSet.parse(reached.gtids).positions
    goes_back = any(
        domain in mine and seq < mine[domain][1]
        for domain, (_, seq) in MariaGtidSet.parse(gtids).positions.items()
    )
    return f"{first} begins behind {gtids}, before {reached.gtids}" if goes_back else ""


def _utc(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S} UTC"


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
