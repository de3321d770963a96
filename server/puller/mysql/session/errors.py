"""The errors between us and a MySQL-protocol server; each message says the way out. Pure.

`refusal` turns a server's error into one of ours: by its number where that is enough, else by its
text. Source: MySQL's and MariaDB's error messages, and what MariaDB 10.11 and MySQL 8.0 and 9.7
were seen to answer.
"""

import struct
from typing import Final

from pyspark_tidemark.redaction import mysql_text

from storage.model.errors import (
    CorruptError,
    InvalidError,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)


class MySqlUnavailableError(UnavailableError):
    """No server answers, or the connection broke."""

    code = "ErrMySQLUnavailable"


class BarrierInterruptedError(UnavailableError):
    """The server went away while a schema change was looked at,
    and what follows it was not taken yet.
    """

    code = "ErrMySQLUnavailable"


class TransactionInterruptedError(UnavailableError):
    """The connection broke within a large transaction of which rows were given already: only a run
    that begins at the checkpoint, with an empty sorter, drops them.
    """

    code = "ErrMySQLUnavailable"


class MySqlLoginError(InvalidError):
    """The server refuses the login: user, password, TLS or privileges."""

    code = "ErrMySQLLogin"


class MySqlPrivilegeError(InvalidError):
    """The user may not do what a source must do."""

    code = "ErrMySQLPrivilege"


class MySqlTlsError(InvalidError):
    """The server has no TLS, or its certificate is not the one that was asked for."""

    code = "ErrMySQLTLS"


class MySqlStatementError(InvalidError):
    """The server refused a statement."""

    code = "ErrMySQLStatement"


class GtidDomainsError(InvalidError):
    """Several servers are named, and transactions of several GTID domains:
    each may have them in another order.
    """

    code = "ErrMySQLGtidDomains"


class LogPurgedError(NotFoundError):
    """The server no longer has the part of its log that comes next:
    only a new dump brings the tables up to date.
    """

    code = "ErrMySQLLogPurged"


class LogBehindError(InvalidError):
    """The server's log ends before what was read already, or has other transactions:
    nothing is ever rewound.
    """

    code = "ErrMySQLGtidNotOnServer"


class LogDamagedError(CorruptError):
    """The server cannot read its own log at the place that comes next."""

    code = "ErrMySQLLogDamaged"


class LogRefusedError(InvalidError):
    """The server refuses to send its log, for a reason that trying again does not change."""

    code = "ErrMySQLLogRefused"


class ServerIdTakenError(UnavailableError):
    """Another reader has come with our server id."""

    code = "ErrMySQLServerIdTaken"


class StatementLoggedError(InvalidError):
    """The log holds a change of rows as a statement, so what it did to the rows is not known."""

    code = "ErrMySQLStatementLogged"


class DdlUnknownError(InvalidError):
    """A DDL statement that may touch a captured table cannot be read."""

    code = "ErrMySQLDDLUnknown"


class RowsMovedError(InvalidError):
    """Rows of a captured table came or went without row events."""

    code = "ErrMySQLRowsMoved"


class TornTransactionError(UnavailableError):
    """A large transaction of which rows were given lost them:
    the log is read again without those rows.

    The server died within it, or ROLLBACK TO SAVEPOINT undid some of them.
    """

    code = "ErrMySQLTransactionTorn"

    def __init__(
        self, gtid: str, place: tuple[str, int], rows: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        why = (
            "was never ended by the server"
            if rows is None
            else "undid some of its rows (ROLLBACK TO SAVEPOINT)"
        )
        super().__init__(
            f"transaction {gtid}, which is large, {why}: the log is read again without these rows"
        )
        self.transaction = (gtid, *place)
        """Its GTID, the log's file, and the offset behind its first event."""
        self.rows = rows
        """Which of its row events are undone, as ranges; None: all."""


class SavepointUnclearError(InvalidError):
    """The log does not tell which rows a ROLLBACK TO SAVEPOINT undid."""

    code = "ErrMySQLSavepointUnclear"


class XaTooLargeError(InvalidError):
    """The rows of prepared XA transactions, which wait for their commit, are more than is kept."""

    code = "ErrMySQLXATooLarge"


class XaUnknownError(InvalidError):
    """An XA transaction was committed whose rows the log held before the changefeed began to read
    it.
    """

    code = "ErrMySQLXAUnknown"


class UnknownStartError(InvalidError):
    """The log of the server begins after the wanted start,
    or nothing is known of that part of it.
    """

    code = "ErrMySQLStartUnknown"


_PACKET_TOO_LARGE: Final = 1153
_LOG_ERRORS: Final = frozenset({1236, 1220, 1198, 1201})
_LOGIN = frozenset({1044, 1045, 1130, 1251, 1698, 1862, 2059, 2061, 4151})
_PRIVILEGE = frozenset({1142, 1143, 1227, 1370, 1396})
_UNAVAILABLE = frozenset(
    {1040, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1203, 1226, 1205, 1213, 1290, 1836}
)
_LOST = frozenset({2002, 2003, 2004, 2005, 2006, 2013, 2014, 2027, 2055})
_ID_TAKEN: Final = frozenset({4052})
_PURGED = (
    "could not find first log file",
    "could not find gtid state requested by slave in any binlog files",
    "has purged binary logs containing",
    "purged required binary logs",
)
_BEHIND = (
    "is not in the master's binlog",
    "which is not in the source's binlog",
    "slave has more gtids than the",
    "replica has more gtids than the",
    "error: connecting slave requested to start from gtid",
    "impossible position",
    "position > file size",
)
_DAMAGED = (
    "bogus data in log event",
    "log event entry exceeded",
    "binlog truncated",
    "event crc check failed",
)
_OUT_OF_PURGE: Final = (
    "the server has purged the part of its log that comes next, so the changes in it are lost: "
    "raise expire_logs_days / binlog_expire_logs_seconds, then resume the changefeed with "
    "--overwrite-checkpoint-ts now and dump its tables (`tidemark cli changefeed dumpstart`); "
    "`tidemark cli verify --repair` removes rows that were deleted meanwhile "
)
_OUT_OF_BEHIND: Final = (
    "the server's log does not hold what was read from its predecessor already (lost or errant "
    "transactions after a failover?); nothing is rewound: point the source at a server that has "
    "them, or create the changefeed anew, with a new target, and dump its tables "
)


def behind(said: str) -> LogBehindError:
    """The server lacks what was read; `said` is in which words it is known."""
    return LogBehindError(_OUT_OF_BEHIND + said)


def refusal(number: int, text: str, doing: str) -> TidemarkError:
    """The error of ours for an error of the server."""
    shown = mysql_text(number, text)
    said = f"(the server: {number} {shown})"
    if number in _ID_TAKEN or "same server_uuid/server_id" in text:
        return ServerIdTakenError(f"another reader uses our server id; another one is taken {said}")
    if number in _LOG_ERRORS:
        return _of_log(text.lower(), said)
    if "insecure transport" in text:
        return MySqlTlsError(
            f"{doing}: the server wants TLS: add ca=/path, or tls=require, to the source URI {said}"
        )
    if number in _LOGIN:
        return MySqlLoginError(
            f"{doing}: the server refuses the login; check user, host and password {said}"
        )
    if number in _PRIVILEGE:
        return MySqlPrivilegeError(
            f"{doing}: a privilege is missing; see `tidemark cli source check` {said}"
        )
    if number == 2026:
        return MySqlTlsError(
            f"{doing}: TLS failed: check tls, ca, cert and key of the source URI {said}"
        )
    if number in _UNAVAILABLE or number in _LOST:
        return MySqlUnavailableError(f"{doing}: {shown} ({number})")
    if number == _PACKET_TOO_LARGE:
        return MySqlStatementError(
            f"{doing}: a row is larger than the server's max_allowed_packet: SET GLOBAL "
            f"max_allowed_packet to more, at most 1 GiB, then resume {said}"
        )
    return MySqlStatementError(f"{doing}: {said}")


def of_packet(payload: bytes, doing: str) -> TidemarkError:
    """The error of ours for an error packet (0xff, number u16, `#` state, text)."""
    (number,) = struct.unpack_from("<H", payload, 1)
    text = payload[3:]
    return refusal(
        number, (text[6:] if text[:1] == b"#" else text).decode("utf-8", "replace"), doing
    )


def _of_log(text: str, said: str) -> TidemarkError:
    if any(part in text for part in _PURGED):
        return LogPurgedError(_OUT_OF_PURGE + said)
    if any(part in text for part in _BEHIND):
        return behind(said)
    if any(part in text for part in _DAMAGED):
        return LogDamagedError(
            "the server cannot read its log there; check its disk, raise max_allowed_packet if "
            f"the server says so, or use a replica {said}"
        )
    return LogRefusedError(f"the server does not send its log {said}")
