"""The errors of transactions on a key; the store's edge turns each into its `kvrpcpb.KeyError`."""

import enum
from collections.abc import Sequence

from storage.model.errors import (
    ClosedError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TidemarkError,
)
from storage.mvcc.record import Lock


class ConflictReason(enum.IntEnum):
    """Why a write conflicts (numbers of kvrpcpb.WriteConflict.Reason)."""

    UNKNOWN = 0
    OPTIMISTIC = 1
    PESSIMISTIC_RETRY = 2
    SELF_ROLLED_BACK = 3


class StoreStoppedError(ClosedError):
    """The store is shutting down."""

    code = "ErrStoreStopped"


class MvccError(TidemarkError):
    """Base of the outcomes that belong to one command; they never stop the store."""


class KeyIsLockedError(MvccError, ConflictError):
    """Another transaction holds the key."""

    code = "ErrKeyIsLocked"

    def __init__(self, key: bytes, lock: Lock) -> None:
        super().__init__(
            f"key {key.hex()} is locked by the transaction {lock.start_ts}; resolve its lock, "
            "then retry"
        )
        self.key = key
        self.lock = lock


class WriteConflictError(MvccError, ConflictError):
    """A newer version exists, or the transaction itself was rolled back."""

    code = "ErrWriteConflict"

    def __init__(
        self,
        key: bytes,
        primary: bytes,
        start_ts: int,
        conflict_start_ts: int,
        conflict_commit_ts: int,
        reason: ConflictReason,
    ) -> None:
        super().__init__(
            f"transaction {start_ts} conflicts on key {key.hex()} with {conflict_start_ts}, "
            f"committed at {conflict_commit_ts} ({reason.name}); start it again"
        )
        self.key = key
        self.primary = primary
        self.start_ts = start_ts
        self.conflict_start_ts = conflict_start_ts
        self.conflict_commit_ts = conflict_commit_ts
        self.reason = reason


class AlreadyExistsError(MvccError, ConflictError):
    """A key that must be new has a value."""

    code = "ErrKeyAlreadyExists"

    def __init__(self, key: bytes) -> None:
        super().__init__(f"key {key.hex()} already exists")
        self.key = key


class AssertionFailedError(MvccError, ConflictError):
    """The client's belief about a key's existence is wrong."""

    code = "ErrAssertionFailed"

    def __init__(
        self, key: bytes, start_ts: int, assertion: int, existing: tuple[int, int]
    ) -> None:
        super().__init__(
            f"assertion {assertion} of transaction {start_ts} on key {key.hex()} does not hold"
        )
        self.key = key
        self.start_ts = start_ts
        self.assertion = assertion
        self.existing_start_ts, self.existing_commit_ts = existing


class TxnNotFoundError(MvccError, NotFoundError):
    """The transaction has neither a lock nor a record."""

    code = "ErrTxnNotFound"

    def __init__(self, primary: bytes, start_ts: int) -> None:
        super().__init__(f"transaction {start_ts} left no trace on its primary key {primary.hex()}")
        self.primary = primary
        self.start_ts = start_ts


class TxnLockNotFoundError(MvccError, ConflictError):
    """The lock to commit is gone: the transaction was rolled back."""

    code = "ErrTxnLockNotFound"

    def __init__(self, key: bytes, start_ts: int, commit_ts: int) -> None:
        super().__init__(
            f"transaction {start_ts} has no lock on key {key.hex()} to commit at {commit_ts}; it "
            "was rolled back"
        )
        self.key = key


class CommitTsExpiredError(MvccError, ConflictError):
    """A reader pushed the lock's min_commit_ts beyond the asked commit_ts."""

    code = "ErrCommitTsExpired"

    def __init__(self, key: bytes, start_ts: int, commit_ts: int, min_commit_ts: int) -> None:
        super().__init__(
            f"transaction {start_ts} must commit at or after {min_commit_ts}, not at {commit_ts}"
        )
        self.key = key
        self.start_ts = start_ts
        self.commit_ts = commit_ts
        self.min_commit_ts = min_commit_ts


class PrimaryMismatchError(MvccError, ConflictError):
    """The key asked as a primary is a secondary of its transaction."""

    code = "ErrPrimaryMismatch"

    def __init__(self, key: bytes, lock: Lock) -> None:
        super().__init__(
            f"the primary of transaction {lock.start_ts} is {lock.primary.hex()}, not {key.hex()}"
        )
        self.key = key
        self.lock = lock


class CommittedError(MvccError, ConflictError):
    """The transaction to roll back is committed."""

    code = "ErrTxnCommitted"

    def __init__(self, key: bytes, start_ts: int, commit_ts: int) -> None:
        super().__init__(
            f"transaction {start_ts} is committed at {commit_ts} on key {key.hex()}; it cannot go "
            "back"
        )
        self.commit_ts = commit_ts


class PessimisticLockLostError(MvccError, ConflictError):
    """The pessimistic lock a prewrite or a lock request builds on is gone or of another kind."""

    code = "ErrPessimisticLockNotFound"

    def __init__(self, key: bytes, start_ts: int) -> None:
        super().__init__(
            f"transaction {start_ts} does not hold the pessimistic lock on key {key.hex()}; start "
            "it again"
        )
        self.key = key


class PessimisticLockRolledBackError(MvccError, ConflictError):
    """A late request for a pessimistic lock: its transaction was rolled back on the key."""

    code = "ErrPessimisticLockRolledBack"

    def __init__(self, key: bytes, start_ts: int) -> None:
        super().__init__(
            f"transaction {start_ts} was rolled back on key {key.hex()}; start it again"
        )
        self.key = key


class InvalidTxnError(MvccError, InvalidError):
    """A request that makes no sense for any state."""

    code = "ErrInvalidTxn"


class KeyErrorsError(MvccError, ConflictError):
    """Several keys of one command met a lock; nothing of it was written."""

    code = "ErrKeysLocked"

    def __init__(self, errors: Sequence[MvccError]) -> None:
        super().__init__("; ".join(err.message for err in errors))
        self.errors = tuple(errors)
