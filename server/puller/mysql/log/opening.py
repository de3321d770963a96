"""Finds a server that has what comes next in the log, and opens it there; says where a log ends
now, and where it begins.

A new changefeed begins behind the XA transactions that are prepared on the server: their rows are
in the log before that place.
"""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import structlog

from server.puller.mysql.log.position import LogPosition, SavedPosition, TimeLimits
from server.puller.mysql.log.read_server import NamedServer, ReadServer, check_log, name_of
from server.puller.mysql.log.stream import LogPlace, LogStream, open_stream
from server.puller.mysql.session.connection import Session, log_in, log_in_to
from server.puller.mysql.session.errors import (
    GtidDomainsError,
    LogPurgedError,
    MySqlPrivilegeError,
    MySqlStatementError,
    MySqlUnavailableError,
    UnknownStartError,
    behind,
)
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.transaction.scanner import log_end
from server.puller.mysql.transaction.transactions import Transactions, UndecidedTimes
from server.puller.open_transactions import OpenTransactions
from storage.model.errors import TidemarkError
from storage.model.ts import compose, physical_ms
from storage.mysql.event import Events

_FIRST_S: Final = 10.0
_EXECUTED_WAIT_S: Final = 5.0
_XA_WAIT_S: Final = 5.0
_XA_LOOK_S: Final = 0.05
_PLACE_TRIES: Final = 10
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenLog:
    """A log that flows, and a session for statements with the same server."""

    stream: LogStream
    session: Session
    first: list[Events]
    fold_case: bool
    """The server keeps names of tables in lower case."""
    server: str
    """By what the server is known again."""
    same_server: bool
    """It has the log of which the saved position is a place."""

    def close(self) -> None:
        """End both connections."""
        self.stream.close()
        self.session.close()


def open_log(
    options: MySqlOptions,
    saved_position: SavedPosition,
    server_id: int,
    read_server: ReadServer | None = None,
) -> OpenLog:
    """Open the log behind `saved_position` at the first server that has it; blocks.

    `read_server` must have it where it was read.

    Raises:
        GtidDomainsError: there is another server to choose, and its order may be another one.
        MySqlUnavailableError: a server that may have it does not answer.
        LogPurgedError, LogBehindError, ServerIdTakenError, …: no server that answers has it.
    """
    check_domains(options, saved_position)
    failures: list[TidemarkError] = []
    for address in options.addresses:
        opened: list[Session | LogStream] = []
        try:
            session = log_in_to(address, options)
            opened.append(session)
            reached = as_asked(session, saved_position)
            _check_executed(session, reached)
            reader = log_in_to(address, options)
            opened.append(reader)
            # Of the connection that reads: behind one address there may be several servers.
            named = NamedServer(name_of(reader), address, options)
            # Asked for a file and an offset, a server reads there, whether it is known by name or
            # not.
            same_server = check_log(named, reached, read_server) or not reached.gtids
            place = LogPlace(reached.gtids, reached.file, reached.position, reached.gtid_block)
            stream = open_stream(reader, place, options, server_id)
            opened.append(stream)
            folds = int(session.row("SELECT @@lower_case_table_names")[0]) > 0
            first = stream.take(_FIRST_S)
            return OpenLog(stream, session, first, folds, named.name, same_server)
        except TidemarkError as err:
            failures.append(err)
            _close_all(opened)
        except BaseException:
            _close_all(opened)
            raise
    silent = next((err for err in failures if isinstance(err, MySqlUnavailableError)), None)
    if silent is not None and len(failures) > 1:
        raise MySqlUnavailableError(
            "no server has what comes next: " + "; ".join(err.message for err in failures)
        )
    raise failures[0]


def present(options: MySqlOptions) -> SavedPosition:
    """Find where the log ends now, with a ts that everything before is at or below; blocks.

    Raises:
        MySqlUnavailableError, MySqlLoginError, …: no server lets us ask.
        UnknownStartError: the server writes no log.
    """
    with log_in(options) as session:
        saved_position = _present(session)
    check_domains(options, saved_position)
    return saved_position


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a changefeed begins: all that was committed before is at or below `ts`;
    `saved_position` is before what follows.
    """

    saved_position: SavedPosition
    ts: int
    time_limits: TimeLimits
    """What was decided about times between the two."""
    server: str = ""
    """By what the server is known again; empty: its log went on while it was asked for its place
    and its GTIDs, so that they may be those of two places.
    """


def beginning(options: MySqlOptions) -> Beginning:
    """A ts that everything committed before is at or below,
    and a saved position before all rows of what follows it; blocks.

    Rows of an XA transaction are in the log where it was prepared, maybe before the place at which
    it is committed. So the ts is that of a later place, when no transaction is prepared any more
    that was so at the saved position. One that stays prepared for longer than `_XA_WAIT_S` stops
    the changefeed when it is committed (XaUnknownError).

    Raises:
        As `present`.
    """
    with log_in(options) as session:
        saved_position, is_one_place = _present_place(session)
        server = name_of(session) if is_one_place else ""
        check_domains(options, saved_position)
        waiting, deadline = prepared_xids(session), time.monotonic() + _XA_WAIT_S
        while (left := waiting & prepared_xids(session)) and time.monotonic() < deadline:
            time.sleep(_XA_LOOK_S)
        if left:
            _log.warning(
                "XA transactions stay prepared: their rows must be dumped if they commit",
                count=len(left),
            )
        if (_gtids(session), *log_end(session)) == (
            saved_position.gtids,
            saved_position.file,
            saved_position.position,
        ):
            time_limits = TimeLimits.accepting(accepted_until_ms(session, options))
            # nothing is behind it, nor between its GTIDs and its offset
            return Beginning(saved_position, saved_position.ts, time_limits, server)
        until_ms = accepted_until_ms(session, options)
        reader = log_in_to(session.address, options)
    begins = _ts_at_end(reader, saved_position, options, TimeLimits.accepting(until_ms))
    return replace(begins, server=server)


def oldest(options: MySqlOptions, start_ts: int) -> SavedPosition:
    """The beginning of the oldest log of a server, for a start without a saved position; blocks.

    Raises:
        UnknownStartError: the server's log does not say when it began.
        LogPurgedError: the oldest log begins after `start_ts`.
    """
    with log_in(options) as session:
        file = str(session.execute("SHOW BINARY LOGS")[0][0])
        began_s = began(session, file, options)
    if began_s * 1000 > physical_ms(start_ts):
        began_at = datetime.fromtimestamp(began_s, UTC)
        raise LogPurgedError(
            f"the oldest log of the server ({file}) begins at {began_at:%Y-%m-%d %H:%M:%S} UTC "
            f"({compose(began_s * 1000)}), after the start {start_ts}: leave the start out, and "
            "dump the tables"
        )
    return SavedPosition(0, "", file)


def check_domains(options: MySqlOptions, saved_position: SavedPosition) -> None:
    """commit_ts follows all domains in the log's order,
    which is each server's own between domains.

    A row with a lower commit_ts on another server would be taken for one that was read already.

    Raises:
        GtidDomainsError: more than one server is named, and more than one domain is in the log.
    """
    if len(options.addresses) > 1 and saved_position.domains > 1:
        raise GtidDomainsError(
            f"the log has transactions of several GTID domains ({saved_position.gtids}), which each "
            "server may have in another order: name one server only in the source URI, or write "
            "under one gtid_domain_id and forget the others (FLUSH BINARY LOGS DELETE_DOMAIN_ID)"
        )


def _check_executed(session: Session, saved_position: SavedPosition) -> None:
    """A MySQL that lacks what was read would send what it has instead, or nothing for ever;
    MariaDB refuses by itself.

    Its log may be some ms ahead of what it says it has executed, and a replica further behind, so
    it is given a while.
    """
    if not saved_position.is_mysql or session.flavor.is_mariadb:
        return
    ((missing,),) = session.execute(
        "SELECT WAIT_FOR_EXECUTED_GTID_SET(%s, %s)", (saved_position.gtids, _EXECUTED_WAIT_S)
    )
    if missing:
        ((lacking,),) = session.execute(
            "SELECT GTID_SUBTRACT(%s, @@global.gtid_executed)", (saved_position.gtids,)
        )
        raise behind(f"(the server has not executed {lacking})")


def _present_place(session: Session) -> tuple[SavedPosition, bool]:
    """The present position, and whether its GTIDs are those of its place: a log to which others
    write may go on in between, each of the few times that it is asked.
    """
    for _ in range(_PLACE_TRIES):
        saved_position = _present(session)
        if _gtids(session) == saved_position.gtids:
            return saved_position, True
    return saved_position, False


def _present(session: Session) -> SavedPosition:
    gtids = _gtids(session)
    file, position = log_end(session)
    if not file:
        raise UnknownStartError(
            "the server writes no log: set log_bin; see `tidemark cli source check`"
        )
    return SavedPosition(compose(_now_ms(session)), gtids, file, position)


def _ts_at_end(
    reader: Session, saved_position: SavedPosition, options: MySqlOptions, time_limits: TimeLimits
) -> Beginning:
    """The commit_ts of the last transaction in the log now;
    times that are later than `time_limits` accept are odd.
    """
    place = LogPlace(
        saved_position.gtids,
        saved_position.file,
        saved_position.position,
        saved_position.gtid_block,
    )
    stream = open_stream(reader, place, options, 0, follow=False)
    with closing(stream), closing(OpenTransactions()) as shared:
        transactions = Transactions(
            LogPosition(saved_position), time_limits=time_limits, shared=shared
        )
        while not stream.ended:
            for events in stream.take(_FIRST_S):
                for item in transactions.take(events):
                    if isinstance(item, UndecidedTimes):
                        transactions.time_limits = transactions.time_limits.decide(
                            item.previous_ts, item.times_ms, 0
                        ).time_limits
    return Beginning(saved_position, transactions.position.ts, transactions.time_limits)


def accepted_until_ms(session: Session, options: MySqlOptions) -> int:
    """The latest time that is accepted now, by the later of the server's clock and ours; blocks."""
    return _now_ms(session) + options.max_clock_skew_ms


def _now_ms(session: Session) -> int:
    ((now_ms,),) = session.execute("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)")
    return max(int(now_ms), int(time.time() * 1000))


def as_asked(session: Session, saved_position: SavedPosition) -> SavedPosition:
    """A saved position as the session's server can be asked for it: without GTIDs if it does not
    send its log by them.
    """
    return saved_position if _sends_by_gtid(session) else replace(saved_position, gtids="")


def _sends_by_gtid(session: Session) -> bool:
    """Whether the server can be asked for what follows GTIDs. A MySQL whose gtid_mode was ON once
    still has GTIDs, and its log files begin with them.
    """
    if session.flavor.is_mariadb:
        return True
    return str(session.row("SELECT @@global.gtid_mode")[0]).upper() == "ON"


def _gtids(session: Session) -> str:
    """What is in the log, read before the end of the log is: a little less may be in it."""
    if session.flavor.is_mariadb:
        return str(session.row("SELECT @@gtid_binlog_pos")[0])
    if not _sends_by_gtid(session):
        return ""
    return "".join(str(session.row("SELECT @@gtid_executed")[0]).split())


def began(session: Session, file: str, options: MySqlOptions) -> int:
    """The second in which a log file of the session's server begins; blocks. Raises as `oldest`.

    A file that was begun by a session that has SET timestamp has the session's time: if that is
    still to come, the first time behind it counts.
    """
    last_s = accepted_until_ms(session, options) // 1000
    reader = log_in_to(session.address, options)
    stream = open_stream(reader, LogPlace("", file), options, 0, follow=False)
    try:
        while not stream.ended:
            for events in stream.take(_FIRST_S):
                times = events.timestamps[(events.timestamps > 0) & (events.next_positions > 0)]
                accepted = times[times <= last_s]
                if len(accepted):
                    return int(accepted[0])
    finally:
        stream.close()
    raise UnknownStartError(f"the log {file} of the server does not say when it began")


def _close_all(opened: list[Session | LogStream]) -> None:
    for each in reversed(opened):
        each.close()


def prepared_xids(session: Session) -> frozenset[str]:
    """List the XA transactions that are prepared or being committed; xids as in the log: `hex,hex`.

    Empty where the server does not tell the user (MySQL's XA_RECOVER_ADMIN).

    Raises:
        MySqlUnavailableError: the server does not answer.
    """
    try:
        rows = session.execute("XA RECOVER")
    except (MySqlPrivilegeError, MySqlStatementError):
        return frozenset()
    return frozenset(_xid(int(first), int(second), data) for _, first, second, data in rows)


def _xid(first: int, second: int, data: bytes | str) -> str:
    both = data.encode("latin-1") if isinstance(data, str) else data
    return f"{both[:first].hex()},{both[first : first + second].hex()}"
