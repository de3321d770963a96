"""The errors of the GC state's rules, in PD's words: clients and operators know the texts, and some
compare them.
"""

from storage.model.errors import InvalidError


class SafePointRequestError(InvalidError):
    """The request can never be accepted as it is; the texts are PD's."""

    code = "ErrSafePointRequest"


class BehindTxnSafePointError(SafePointRequestError):
    """The barrier lies below a txn safe point: history it asks for may be gone."""


class KeyspaceNotFoundError(SafePointRequestError):
    """No keyspace has that id or name."""

    def __init__(self) -> None:
        super().__init__("[PD:keyspace:ErrKeyspaceNotFound]keyspace does not exist")


def bad_argument(name: str, value: object) -> SafePointRequestError:
    """The argument is invalid."""
    return SafePointRequestError(
        f"[PD:common:ErrInvalidArgument]invalid argument for {name}: {value}"
    )


def reserved_id(barrier_id: str) -> SafePointRequestError:
    """`gc_worker` is no barrier."""
    text = f"trying to set a GC barrier with a barrier ID that is reserved: {barrier_id}"
    return SafePointRequestError(f"[PD:gc:ErrReservedGCBarrierID]{text}")


def txn_safe_point_goes_back(current: int, given: int) -> SafePointRequestError:
    """The txn safe point never goes back."""
    text = (
        f"trying to update txn safe point to a smaller value, current value: {current}, given: "
        f"{given}"
    )
    return SafePointRequestError(f"[PD:gc:ErrDecreasingTxnSafePoint]{text}")


def gc_safe_point_goes_back(current: int, given: int) -> SafePointRequestError:
    """The GC safe point never goes back."""
    text = (
        f"trying to update GC safe point to a smaller value, current value: {current}, given: "
        f"{given}"
    )
    return SafePointRequestError(f"[PD:gc:ErrDecreasingGCSafePoint]{text}")


def gc_safe_point_too_large(current: int, given: int, txn_safe_point: int) -> SafePointRequestError:
    """Stores never collect what may still be read."""
    text = (
        "trying to update GC safe point to a too large value that exceeds the txn safe point, "
        f"current value: {current}, given: {given}, current txn safe point: {txn_safe_point}"
    )
    return SafePointRequestError(f"[PD:gc:ErrGCSafePointExceedsTxnSafePoint]{text}")


def barrier_behind(barrier_ts: int, txn_safe_point: int) -> BehindTxnSafePointError:
    """A barrier must be set before the txn safe point passes it."""
    text = (
        f"trying to set a GC barrier on ts {barrier_ts} which is already behind the txn safe "
        f"point {txn_safe_point}"
    )
    return BehindTxnSafePointError(f"[PD:gc:ErrGCBarrierTSBehindTxnSafePoint]{text}")


def global_barrier_behind(
    barrier_ts: int, txn_safe_point: int, keyspace: str
) -> BehindTxnSafePointError:
    """A global barrier must be set before any keyspace's txn safe point passes it."""
    text = (
        f"trying to set a global GC barrier on ts {barrier_ts} which is already behind the txn "
        f"safe point {txn_safe_point} of keyspace {keyspace}"
    )
    return BehindTxnSafePointError(f"[PD:gc:ErrGlobalGCBarrierTSBehindTxnSafePoint]{text}")


def no_gc_of_its_own(name: str, keyspace_id: int) -> SafePointRequestError:
    """A keyspace under unified GC has nothing to advance."""
    text = (
        f"trying to manage GC in keyspace {name} (id: {keyspace_id}) where keyspace level GC is "
        "not enabled"
    )
    return SafePointRequestError(f"[PD:gc:ErrGCOnInvalidKeyspace]{text}")


def gc_worker_ends() -> SafePointRequestError:
    """`gc_worker` is there for ever."""
    return SafePointRequestError("TTL of gc_worker's service safe point must be infinity")


def gc_worker_stays() -> SafePointRequestError:
    """`gc_worker` cannot be removed."""
    return SafePointRequestError("cannot remove service safe point of gc_worker")
