"""XA transactions that a server has prepared."""

from server.puller.mysql.connection import Session
from server.puller.mysql.errors import MySqlPrivilegeError, MySqlStatementError


def prepared_xids(session: Session) -> frozenset[str]:
    """Those prepared, or being committed, at this moment, as the log names them: `hex,hex`.

    None where the server does not tell the user (MySQL's XA_RECOVER_ADMIN).

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
