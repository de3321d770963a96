"""What a server's error means, and what to do about it; by number where that is enough,
else by its text. Pure.

Source: MySQL's and MariaDB's error messages, and what MariaDB 10.11 and MySQL 8.0 and 9.7 were seen
to answer.
"""

import struct
from typing import Final

from server.puller.mysql.errors import (
    LogBehindError,
    LogDamagedError,
    LogPurgedError,
    LogRefusedError,
    MySqlLoginError,
    MySqlPrivilegeError,
    MySqlStatementError,
    MySqlTlsError,
    MySqlUnavailableError,
    ServerIdTakenError,
)
from storage.model.errors import TidemarkError

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
    said = f"(the server: {number} {text})"
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
            f"{doing}: the server does not let us in: check user, host and password {said}"
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
        return MySqlUnavailableError(f"{doing}: {text} ({number})")
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
            f"the server cannot read its log there; check its disk, or use a replica {said}"
        )
    return LogRefusedError(f"the server does not send its log {said}")
