"""What can go wrong between us and a MySQL-protocol server; each message says the way out."""

from storage.model.errors import CorruptError, InvalidError, NotFoundError, UnavailableError


class MySqlUnavailableError(UnavailableError):
    """No server answers, or the connection broke."""

    code = "ErrMySQLUnavailable"


class BarrierInterruptedError(UnavailableError):
    """The server went away while a schema change was looked at,
    and what follows it was not taken yet.
    """

    code = "ErrMySQLUnavailable"


class MySqlLoginError(InvalidError):
    """The server does not let us in: user, password, TLS or privileges."""

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
        self.place = place
        """The log's file, and the offset behind its first event:
        its GTID may be given out again.
        """
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


class NoAnchorError(InvalidError):
    """The log of the server begins after the wanted start,
    or nothing is known of that part of it.
    """

    code = "ErrMySQLStartUnknown"
