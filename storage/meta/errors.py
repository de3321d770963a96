"""The errors of metadata calls: one table of etcd's statuses and texts,
used by the client and by the server.

`text` is exactly etcd's: its clients compare it. `message` adds what to do about it.
"""

from storage.model.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)


class EtcdError(TidemarkError):
    """An error with the gRPC status name and text that etcd gives it."""

    status = "UNKNOWN"
    text = ""
    advice = ""

    def __init__(self, text: str = "") -> None:
        self.text = text or type(self).text
        super().__init__(f"{self.text}; {self.advice}" if self.advice else self.text)


class MetaRequestError(EtcdError, InvalidError):
    """The request is malformed."""

    code = "ErrMetaRequest"
    status = "INVALID_ARGUMENT"


class TooManyOpsError(MetaRequestError):
    """A transaction has more operations than etcd takes."""

    code = "ErrMetaTooManyOps"
    text = "etcdserver: too many operations in txn request"
    advice = (
        "at most 128 comparisons, and 128 operations in each branch; split it, or use write_all "
        "if order is free"
    )


class RequestTooLargeError(MetaRequestError):
    """A request has more bytes than etcd takes."""

    code = "ErrMetaRequestTooLarge"
    text = "etcdserver: request is too large"
    advice = "at most 1.5 MiB a request; write fewer or smaller values at once"


class CompactedError(EtcdError, ConflictError):
    """The requested revision is no longer kept."""

    code = "ErrMetaCompacted"
    status = "OUT_OF_RANGE"
    text = "etcdserver: mvcc: required revision has been compacted"
    advice = "read the present state and go on from its revision"

    def __init__(self, compact_revision: int = 0) -> None:
        super().__init__()
        self.compact_revision = compact_revision


class FutureRevisionError(EtcdError, InvalidError):
    """The requested revision does not exist yet."""

    code = "ErrMetaFutureRevision"
    status = "OUT_OF_RANGE"
    text = "etcdserver: mvcc: required revision is a future revision"


class LeaseNotFoundError(EtcdError, NotFoundError):
    """The lease expired, was revoked, or never existed."""

    code = "ErrMetaLeaseNotFound"
    status = "NOT_FOUND"
    text = "etcdserver: requested lease not found"


class LeaseExistsError(EtcdError, ConflictError):
    """The requested lease id is taken."""

    code = "ErrMetaLeaseExists"
    status = "FAILED_PRECONDITION"
    text = "etcdserver: lease already exists"


class LeaseTtlError(EtcdError, InvalidError):
    """The requested TTL is above the maximum."""

    code = "ErrMetaLeaseTtl"
    status = "OUT_OF_RANGE"
    text = "etcdserver: too large lease TTL"


class MetaUnavailableError(EtcdError, UnavailableError):
    """No metadata server answered in time."""

    code = "ErrMetaUnavailable"
    status = "UNAVAILABLE"


class TooManyRequestsError(MetaUnavailableError):
    """The server has more requests waiting than it will hold."""

    code = "ErrMetaBusy"
    status = "RESOURCE_EXHAUSTED"
    text = "etcdserver: too many requests"
    advice = "slow down and try again; writes that share a transaction cost one request"


class NoSpaceError(MetaUnavailableError):
    """The database reached its quota: only reads and deletes are taken until an operator makes
    room.
    """

    code = "ErrMetaNoSpace"
    status = "RESOURCE_EXHAUSTED"
    text = "etcdserver: mvcc: database space exceeded"
    advice = (
        "delete keys, `etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm`; or raise "
        "the quota (--quota-backend-bytes of etcd, --metadata-quota-bytes of the coordinator)"
    )


class MetaAuthError(EtcdError, InvalidError):
    """The user name or password is wrong."""

    code = "ErrMetaAuth"
    status = "INVALID_ARGUMENT"
    text = "etcdserver: authentication failed, invalid user ID or password"
    advice = "check the user name and the password file"


class UserNeededError(MetaAuthError):
    """The server demands a user, and none was given."""

    code = "ErrMetaUserNeeded"
    text = "etcdserver: user name is empty"
    advice = "this etcd demands authentication; give a user and a password file"


class InvalidTokenError(MetaUnavailableError):
    """The token has expired; a new one helps."""

    code = "ErrMetaToken"
    status = "UNAUTHENTICATED"
    text = "etcdserver: invalid auth token"


class AuthOldError(InvalidTokenError):
    """Users or roles changed since the token was made; a new token helps."""

    status = "INVALID_ARGUMENT"
    text = "etcdserver: revision of auth store is old"


class AuthNotEnabledError(EtcdError, InvalidError):
    """The server knows no users; a client goes on without a token."""

    code = "ErrMetaAuthNotEnabled"
    status = "FAILED_PRECONDITION"
    text = "etcdserver: authentication is not enabled"


class PermissionDeniedError(EtcdError, InvalidError):
    """The user may not touch these keys."""

    code = "ErrMetaPermission"
    status = "PERMISSION_DENIED"
    text = "etcdserver: permission denied"
    advice = "grant its role the key range (`etcdctl role grant-permission`)"


class MemberNotFoundError(EtcdError, NotFoundError):
    """No such member."""

    code = "ErrMetaMemberNotFound"
    status = "NOT_FOUND"
    text = "etcdserver: member not found"


class UnsupportedError(EtcdError, InvalidError):
    """The server does not have this call."""

    code = "ErrMetaUnsupported"
    status = "UNIMPLEMENTED"


class CorruptClusterError(EtcdError, CorruptError):
    """The members of the etcd cluster disagree."""

    code = "ErrMetaCorrupt"
    status = "DATA_LOSS"
    text = "etcdserver: corrupt cluster"
    advice = "stop writing and restore the cluster from a snapshot"


class MetaUrlError(InvalidError):
    """The metadata URL is not one of ours."""

    code = "ErrMetaUrl"


def error_of(status: str, details: str) -> EtcdError:
    """An etcd status (its name and its text) as our error."""
    for kind in _named(EtcdError):
        if kind.text in details:
            return kind()
    if "larger than max" in details:  # gRPC's own limit comes before etcd's
        return RequestTooLargeError()
    if status in _BY_STATUS:
        return _BY_STATUS[status](details)
    return MetaRequestError(f"{details} ({status})")


def _named(root: type[EtcdError]) -> list[type[EtcdError]]:
    return [
        kind
        for child in root.__subclasses__()
        for kind in ([child] if child.text else []) + _named(child)
    ]


_BY_STATUS: dict[str, type[EtcdError]] = {
    "INVALID_ARGUMENT": MetaRequestError,
    "UNIMPLEMENTED": UnsupportedError,
    "UNAVAILABLE": MetaUnavailableError,
    "DEADLINE_EXCEEDED": MetaUnavailableError,
    "CANCELLED": MetaUnavailableError,
    "INTERNAL": MetaUnavailableError,
    "UNKNOWN": MetaUnavailableError,
}
