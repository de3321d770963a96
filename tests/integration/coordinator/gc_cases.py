"""What PD's GC calls answer, case by case: some steps, one question,
and its answer in each compatibility.

A dict is what a message holds besides its header; a callable in it checks one field. `PD` was asked
of a real PD.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NEVER_S = (1 << 63) - 1
NULL = 0xFFFF_FFFF
MAX_TS = (1 << 64) - 1
NOT_FOUND = "[PD:keyspace:ErrKeyspaceNotFound]keyspace does not exist"
NO_GC = (
    "[PD:gc:ErrGCOnInvalidKeyspace]trying to manage GC in keyspace DEFAULT (id: 0) where keyspace "
    "level GC is not enabled"
)
NO_ID = "[PD:common:ErrInvalidArgument]invalid argument for barrierID: "
NO_TTL = "[PD:common:ErrInvalidArgument]invalid argument for ttl: 0s"


@dataclass(frozen=True)
class Status:
    """A gRPC error."""

    code: str
    text: str


@dataclass(frozen=True)
class Refused:
    """gRPC OK, and an error in the header."""

    text: str
    type: str = "UNKNOWN"


@dataclass(frozen=True)
class Wait:
    """A step: time passes."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A step, or the question."""

    method: str
    fields: Mapping[str, Any]


Answer = Mapping[str, Any] | Status | Refused


@dataclass(frozen=True)
class Case:
    """`classic` and `pd9` differ where the seed and today's PD do."""

    name: str
    steps: list[Call | Wait]
    question: Call
    classic: Answer
    pd9: Answer
    asked_of_pd: bool = True


def unknown(text: str) -> Status:
    return Status("UNKNOWN", text)


def service(service_id: str | bytes, safe_point: int, ttl_s: int = 1000) -> Call:
    raw = service_id.encode() if isinstance(service_id, str) else service_id
    return Call(
        "UpdateServiceGCSafePoint", {"service_id": raw, "safe_point": safe_point, "TTL": ttl_s}
    )


def worker(safe_point: int, ttl_s: int = NEVER_S) -> Call:
    return service("gc_worker", safe_point, ttl_s)


def update(safe_point: int) -> Call:
    return Call("UpdateGCSafePoint", {"safe_point": safe_point})


def call(method: str, keyspace: int | None = None, **fields: Any) -> Call:
    scope = {} if keyspace is None else {"keyspace_scope": {"keyspace_id": keyspace}}
    return Call(method, {**scope, **fields})


def barrier(
    barrier_id: str, barrier_ts: int, ttl_seconds: int = 1000, keyspace: int | None = None
) -> Call:
    return call(
        "SetGCBarrier",
        keyspace,
        barrier_id=barrier_id,
        barrier_ts=barrier_ts,
        ttl_seconds=ttl_seconds,
    )


def everywhere(barrier_id: str, barrier_ts: int, ttl_seconds: int = 1000) -> Call:
    return call(
        "SetGlobalGCBarrier", barrier_id=barrier_id, barrier_ts=barrier_ts, ttl_seconds=ttl_seconds
    )


def advance(target: int, keyspace: int | None = None) -> Call:
    return call("AdvanceTxnSafePoint", keyspace, target=target)


def collect(target: int, keyspace: int | None = None) -> Call:
    return call("AdvanceGCSafePoint", keyspace, target=target)


STATE = Call("GetGCState", {"include_global_gc_barriers": True})


def around(seconds: int) -> Callable[[int], bool]:
    return lambda ttl_s: seconds - 60 <= ttl_s <= seconds + 1


def forever(ttl_s: int) -> bool:
    """PD subtracts its clock from the largest number."""
    return abs(NEVER_S - ttl_s - time.time()) < 7200


def told(service_id: str, safe_point: int, ttl_s: Callable[[int], bool] = forever) -> Answer:
    return {"service_id": service_id.encode(), "min_safe_point": safe_point, "TTL": ttl_s}


def info(barrier_id: str, barrier_ts: int, ttl_s: int = 1000) -> Mapping[str, Any]:
    return {"barrier_id": barrier_id, "barrier_ts": barrier_ts, "ttl_seconds": exactly(ttl_s)}


def exactly(ttl_s: int) -> Any:
    return ttl_s if ttl_s in (0, NEVER_S) else around(ttl_s)


def state(
    txn: int,
    gc: int,
    barriers: list[Mapping[str, Any]],
    global_barriers: list[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    unified = {"keyspace_scope": {"keyspace_id": NULL}, "is_keyspace_level_gc": False}
    return {
        "gc_state": {
            **unified,
            "txn_safe_point": txn,
            "gc_safe_point": gc,
            "gc_barriers": barriers,
        },
        "global_gc_barriers": {"barriers": global_barriers or []},
    }


def described(
    kind: str, barrier_id: str, barrier_ts: int, ends: str = "2"
) -> Callable[[str], bool]:
    begin = f'{kind} {{ BarrierID: "{barrier_id}", BarrierTS: {barrier_ts}, ExpirationTime: "{ends}'
    return lambda text: text.startswith(begin)


def moved(old: int, new: int, blocker: Any = "") -> Answer:
    return {"old_txn_safe_point": old, "new_txn_safe_point": new, "blocker_description": blocker}


def too_large(current: int, given: int, txn: int) -> str:
    return (
        "[PD:gc:ErrGCSafePointExceedsTxnSafePoint]trying to update GC safe point to a too large "
        f"value that exceeds the txn safe point, current value: {current}, given: {given}, "
        f"current txn safe point: {txn}"
    )


def both(
    name: str, steps: list[Call | Wait], question: Call, answer: Answer, *, asked: bool = True
) -> Case:
    return Case(name, steps, question, answer, answer, asked)


A100, B50 = service("a", 100), service("b", 50)
BACK = (
    "[PD:gc:ErrDecreasingTxnSafePoint]trying to update txn safe point to a smaller value, current "
    "value: {}, given: {}"
)
BEHIND = (
    "[PD:gc:ErrGCBarrierTSBehindTxnSafePoint]trying to set a GC barrier on ts {} which is already "
    "behind the txn safe point {}"
)
RESERVED = (
    "[PD:gc:ErrReservedGCBarrierID]trying to set a GC barrier with a barrier ID that is reserved: "
    "gc_worker"
)
INFINITY = "TTL of gc_worker's service safe point must be infinity"
A, B = info("a", 100), info("b", 50)

OLD_CALLS = [
    both("nothing was ever set", [], Call("GetGCSafePoint", {}), {"safe_point": 0}),
    both("the first service", [], A100, told("gc_worker", 0)),
    both("a second service below the first", [A100], B50, told("gc_worker", 0)),
    both("a second service below the first is stored", [A100, B50], STATE, state(0, 0, [A, B])),
    both("a service goes back", [A100], service("a", 90), told("gc_worker", 0)),
    both(
        "a service that went back is stored",
        [A100, service("a", 90)],
        STATE,
        state(0, 0, [info("a", 90)]),
    ),
    Case(
        "a new service below the txn safe point",
        [A100, B50, worker(80)],
        service("late", 20),
        told("b", 50, around(1000)),
        told("gc_worker", 50),
    ),
    Case(
        "a service goes back below the txn safe point",
        [A100, B50, worker(80)],
        service("a", 30, 5),
        told("b", 50, around(1000)),
        told("gc_worker", 50),
    ),
    both(
        "what is refused changes neither timestamp nor expiry",
        [A100, B50, worker(80), service("late", 20), service("a", 30, 5)],
        STATE,
        state(50, 0, [A, B]),
    ),
    Case(
        "a service at the txn safe point",
        [A100, B50, worker(80)],
        service("c", 50),
        told("b", 50, around(1000)),
        told("gc_worker", 50),
    ),
    Case(
        "a service between the txn safe point and gc_worker, whose blocker is gone",
        [B50, worker(80), service("b", 0, 0)],
        service("c", 60),
        told("gc_worker", 80),
        told("gc_worker", 50),
    ),
    both("no service id", [], service("", 50), unknown(NO_ID)),
    both("no service id to remove", [], service("", 0, 0), unknown(NO_ID)),
    both("a TTL of 0 removes", [A100, service("a", 0, 0)], STATE, state(0, 0, [])),
    both("a negative TTL removes", [A100, service("a", 7, -(1 << 63))], STATE, state(0, 0, [])),
    both("an unknown service is removed", [], service("x", 0, 0), told("gc_worker", 0)),
    both("gc_worker with an end", [], worker(10, 60), unknown(INFINITY)),
    Case(
        "gc_worker is removed",
        [],
        worker(0, 0),
        unknown("cannot remove service safe point of gc_worker"),
        unknown(INFINITY),
    ),
    both("gc_worker moves on", [], worker(10), told("gc_worker", 10)),
    both("gc_worker moves the txn safe point", [worker(10)], STATE, state(10, 0, [])),
    Case(
        "gc_worker goes back",
        [worker(10)],
        worker(5),
        told("gc_worker", 10),
        unknown(BACK.format(10, 5)),
    ),
    Case(
        "gc_worker is blocked", [A100, B50], worker(80), told("b", 50, around(1000)), told("b", 50)
    ),
    both("gc_worker at 2^64 - 1", [], worker(MAX_TS), told("gc_worker", MAX_TS)),
    both(
        "an expired service is listed without TTL",
        [service("s", 5, 2), Wait(3.2)],
        STATE,
        state(0, 0, [info("s", 5, 0)]),
    ),
    both(
        "an expired service blocks nobody",
        [service("s", 5, 2), service("a", 120), Wait(3.2), worker(200)],
        STATE,
        state(120, 0, [info("a", 120)]),
    ),
    both(
        "a service blocks until its TTL is over",
        [service("s", 5, 120), Wait(60)],
        advance(200),
        moved(0, 5, described("GCBarrier", "s", 5)),
        asked=False,
    ),
    both(
        "the largest TTLs never end",
        [service("a", 5, NEVER_S), service("b", 5, NEVER_S - 1), service("c", 5, 9_223_372_037)],
        STATE,
        state(0, 0, [info("a", 5, NEVER_S), info("b", 5, NEVER_S), info("c", 5, NEVER_S)]),
    ),
    both(
        "292 years do end",
        [service("a", 5, 9_223_372_036)],
        STATE,
        state(0, 0, [info("a", 5, 9_223_372_036)]),
    ),
    both("a service at 2^64 - 1", [service("a", MAX_TS)], STATE, state(0, 0, [info("a", MAX_TS)])),
    both(
        "native_br is a global barrier",
        [service("native_br", 60)],
        STATE,
        state(0, 0, [], [info("native_br", 60)]),
    ),
    both(
        "native_br is removed",
        [service("native_br", 60), service("native_br", 0, 0)],
        STATE,
        state(0, 0, [], []),
    ),
    both(
        "native_br below the txn safe point",
        [worker(80)],
        service("native_br", 60),
        told("gc_worker", 80),
    ),
    Case(
        "the GC safe point beyond the txn safe point",
        [service("a", 120), worker(200)],
        update(1000),
        {"new_safe_point": 120},
        unknown(too_large(0, 1000, 120)),
    ),
    Case(
        "the GC safe point of a client that knows no txn safe point",
        [],
        update(100),
        {"new_safe_point": 100},
        unknown(too_large(0, 100, 0)),
    ),
    Case(
        "such a client, after another one advanced the txn safe point",
        [advance(50), collect(50)],
        update(100),
        {"new_safe_point": 100},
        unknown(too_large(50, 100, 50)),
    ),
    both("the GC safe point moves on", [worker(120)], update(100), {"new_safe_point": 100}),
    both(
        "the GC safe point does not go back",
        [worker(120), update(100)],
        update(50),
        {"new_safe_point": 100},
    ),
    both(
        "0 asks for the GC safe point",
        [worker(120), update(100)],
        update(0),
        {"new_safe_point": 100},
    ),
    both(
        "stores see the GC safe point",
        [worker(120), update(100)],
        Call("GetGCSafePoint", {}),
        {"safe_point": 100},
    ),
]

NEWER_CALLS = [
    both(
        "no state was ever set", [], call("GetGCState"), {"gc_state": state(0, 0, [])["gc_state"]}
    ),
    both("a barrier", [], barrier("a", 100), {"new_barrier_info": A}),
    both(
        "a barrier for ever",
        [],
        barrier("a", 100, NEVER_S),
        {"new_barrier_info": info("a", 100, NEVER_S)},
    ),
    both(
        "a barrier goes back",
        [barrier("a", 100), barrier("a", 90)],
        STATE,
        state(0, 0, [info("a", 90)]),
    ),
    both("a barrier behind", [advance(50)], barrier("a", 49), Refused(BEHIND.format(49, 50))),
    both(
        "a barrier at the txn safe point",
        [advance(50)],
        barrier("a", 50),
        {"new_barrier_info": info("a", 50)},
    ),
    both("a barrier without TTL", [], barrier("a", 50, 0), Refused(NO_TTL)),
    both("a barrier with a negative TTL", [], barrier("a", 50, -4), Refused(NO_TTL)),
    both("a barrier without id", [], barrier("", 50), Refused(NO_ID)),
    both("a barrier of gc_worker", [], barrier("gc_worker", 50), Refused(RESERVED)),
    both(
        "a barrier in a unified keyspace", [barrier("a", 100, keyspace=0)], STATE, state(0, 0, [A])
    ),
    both("a barrier in an unknown keyspace", [], barrier("a", 100, keyspace=7), Refused(NOT_FOUND)),
    both(
        "a barrier without TTL in an unknown keyspace",
        [],
        barrier("a", 100, 0, keyspace=7),
        Refused(NO_TTL),
    ),
    both(
        "a barrier is removed",
        [barrier("a", 100)],
        call("DeleteGCBarrier", barrier_id="a"),
        {"deleted_barrier_info": A},
    ),
    both("no barrier is removed", [], call("DeleteGCBarrier", barrier_id="a"), {}),
    both("a barrier without id is removed", [], call("DeleteGCBarrier"), Refused(NO_ID)),
    both(
        "gc_worker is removed as a barrier",
        [],
        call("DeleteGCBarrier", barrier_id="gc_worker"),
        Refused(RESERVED),
    ),
    both(
        "removed in an unknown keyspace",
        [],
        call("DeleteGCBarrier", 7, barrier_id="a"),
        Refused(NOT_FOUND),
    ),
    both("a global barrier", [], everywhere("a", 100), {"new_barrier_info": A}),
    both(
        "a global barrier may be called gc_worker",
        [],
        everywhere("gc_worker", 5),
        {"new_barrier_info": info("gc_worker", 5)},
    ),
    both("a global barrier without TTL", [], everywhere("a", 50, 0), Refused(NO_TTL)),
    both("a global barrier without id", [], everywhere("", 50), Refused(NO_ID)),
    both(
        "a global barrier behind",
        [advance(50)],
        everywhere("a", 49),
        Refused(
            "[PD:gc:ErrGlobalGCBarrierTSBehindTxnSafePoint]trying to set a global GC barrier on "
            "ts 49 which is already behind the txn safe point 50 of keyspace <null_keyspace>"
        ),
    ),
    both(
        "a global barrier is removed",
        [everywhere("a", 100)],
        call("DeleteGlobalGCBarrier", barrier_id="a"),
        {"deleted_barrier_info": A},
    ),
    both("no global barrier is removed", [], call("DeleteGlobalGCBarrier", barrier_id="a"), {}),
    both(
        "a global barrier without id is removed", [], call("DeleteGlobalGCBarrier"), Refused(NO_ID)
    ),
    both("the txn safe point moves on", [advance(10)], advance(600), moved(10, 600)),
    both("the txn safe point at 2^64 - 1", [], advance(MAX_TS), moved(0, MAX_TS)),
    both(
        "a barrier blocks",
        [barrier("a", 150), barrier("b", 300)],
        advance(600),
        moved(0, 150, described("GCBarrier", "a", 150)),
    ),
    both(
        "a barrier for ever blocks",
        [barrier("a", 150, NEVER_S)],
        advance(600),
        moved(0, 150, 'GCBarrier { BarrierID: "a", BarrierTS: 150, ExpirationTime: "<nil>" }'),
    ),
    both(
        "a global barrier blocks",
        [barrier("a", 150), everywhere("é", 140)],
        advance(600),
        moved(0, 140, described("GlobalGCBarrier", "\\u00e9", 140)),
    ),
    both(
        "of equals the barrier blocks",
        [barrier("b", 9), barrier("a", 9), everywhere("a", 9)],
        advance(10),
        moved(0, 9, described("GCBarrier", "a", 9)),
    ),
    both(
        "a barrier at the target does not block", [barrier("a", 150)], advance(150), moved(0, 150)
    ),
    both("the txn safe point goes back", [advance(50)], advance(49), Refused(BACK.format(50, 49))),
    both("the txn safe point stays", [advance(50)], advance(50), moved(50, 50)),
    both("an unknown keyspace advances", [], advance(50, 7), Refused(NOT_FOUND)),
    both("a unified keyspace advances", [], advance(50, 0), Refused(NO_GC)),
    both("the null keyspace advances by name", [], advance(50, NULL), moved(0, 50)),
    both(
        "an id of more than 24 bits is the null keyspace", [], advance(50, 0x1000000), moved(0, 50)
    ),
    both(
        "GC moves on", [advance(50)], collect(40), {"old_gc_safe_point": 0, "new_gc_safe_point": 40}
    ),
    both(
        "GC goes back",
        [advance(50), collect(40)],
        collect(39),
        Refused(
            "[PD:gc:ErrDecreasingGCSafePoint]trying to update GC safe point to a smaller value, "
            "current value: 40, given: 39"
        ),
    ),
    both("GC beyond the txn safe point", [advance(50)], collect(51), Refused(too_large(0, 51, 50))),
    both("GC in a unified keyspace", [], collect(1, 0), Refused(NO_GC)),
    both("GC in an unknown keyspace", [], collect(1, 7), Refused(NOT_FOUND)),
    both("the state of an unknown keyspace", [], call("GetGCState", 7), Refused(NOT_FOUND)),
    both(
        "the state of a unified keyspace",
        [advance(50)],
        call("GetGCState", 0),
        {"gc_state": state(50, 0, [])["gc_state"]},
    ),
    both(
        "the state without barriers",
        [barrier("a", 100), advance(50)],
        call("GetGCState", exclude_gc_barriers=True),
        {"gc_state": state(50, 0, [])["gc_state"]},
    ),
    both(
        "all states",
        [barrier("a", 100), everywhere("b", 50), advance(50)],
        call("GetAllKeyspacesGCStates"),
        {
            "gc_states": [state(50, 0, [A])["gc_state"], {"keyspace_scope": {"keyspace_id": 0}}],
            "global_gc_barriers": [B],
        },
    ),
]

V2_CALLS = [
    both(
        "V2: a keyspace without GC of its own",
        [],
        Call("GetGCSafePointV2", {"keyspace_id": 0}),
        unknown(NO_GC),
    ),
    both(
        "V2: an unknown keyspace",
        [],
        Call("GetGCSafePointV2", {"keyspace_id": 7}),
        unknown(NOT_FOUND),
    ),
    both(
        "V2: the null keyspace",
        [worker(50), update(40)],
        Call("GetGCSafePointV2", {"keyspace_id": NULL}),
        {"safe_point": 40},
    ),
    both(
        "V2: moved",
        [worker(50)],
        Call("UpdateGCSafePointV2", {"keyspace_id": NULL, "safe_point": 40}),
        {"new_safe_point": 40},
    ),
    both(
        "V2: moved in a unified keyspace",
        [],
        Call("UpdateGCSafePointV2", {"keyspace_id": 0, "safe_point": 40}),
        unknown(NO_GC),
    ),
    both(
        "V2: moved in an unknown keyspace",
        [],
        Call("UpdateGCSafePointV2", {"keyspace_id": 7, "safe_point": 40}),
        unknown(NOT_FOUND),
    ),
    both(
        "V2: a service in a unified keyspace",
        [worker(40)],
        Call(
            "UpdateServiceSafePointV2",
            {"keyspace_id": 0, "service_id": b"a", "safe_point": 66, "ttl": 100},
        ),
        {"service_id": b"gc_worker", "min_safe_point": 40, "ttl": forever},
    ),
    both(
        "V2: a service in an unknown keyspace",
        [],
        Call(
            "UpdateServiceSafePointV2",
            {"keyspace_id": 7, "service_id": b"a", "safe_point": 66, "ttl": 100},
        ),
        unknown(NOT_FOUND),
    ),
    both(
        "V2: all",
        [],
        Call("GetAllGCSafePointV2", {}),
        {"gc_safe_points": [{"keyspace_id": 0, "gc_safe_point": 0}], "revision": 0},
    ),
    both(
        "V2: the watch is obsolete",
        [],
        Call("WatchGCSafePointV2", {}),
        Status(
            "UNIMPLEMENTED",
            "WatchGCSafePointV2 is obsolete. Poll GetAllKeyspacesGCStates instead if necessary",
        ),
    ),
]

CASES = [*OLD_CALLS, *NEWER_CALLS, *V2_CALLS]
