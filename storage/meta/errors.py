"""What a metadata call can fail with. The texts are etcd's own: clients of etcd compare them."""

from storage.model.errors import ConflictError, InvalidError, NotFoundError, UnavailableError


class MetaRequestError(InvalidError):
    """The request is malformed."""

    code = "ErrMetaRequest"


class CompactedError(ConflictError):
    """The asked revision is no longer kept; read the present state and watch from there."""

    code = "ErrMetaCompacted"

    def __init__(self, compact_revision: int) -> None:
        super().__init__("etcdserver: mvcc: required revision has been compacted")
        self.compact_revision = compact_revision


class FutureRevisionError(InvalidError):
    """The asked revision does not exist yet."""

    code = "ErrMetaFutureRevision"

    def __init__(self) -> None:
        super().__init__("etcdserver: mvcc: required revision is a future revision")


class LeaseNotFoundError(NotFoundError):
    """The lease expired, was revoked, or never was."""

    code = "ErrMetaLeaseNotFound"

    def __init__(self) -> None:
        super().__init__("etcdserver: requested lease not found")


class LeaseExistsError(ConflictError):
    """The asked lease id is taken."""

    code = "ErrMetaLeaseExists"

    def __init__(self) -> None:
        super().__init__("etcdserver: lease already exists")


class LeaseTtlError(InvalidError):
    """The asked TTL is beyond what a lease can have."""

    code = "ErrMetaLeaseTtl"

    def __init__(self) -> None:
        super().__init__("etcdserver: too large lease TTL")


class MetaUnavailableError(UnavailableError):
    """No metadata server answered in time."""

    code = "ErrMetaUnavailable"


class MetaUrlError(InvalidError):
    """The metadata URL is not one of ours."""

    code = "ErrMetaUrl"
