"""What a transaction asks of one key. Pure."""

import enum
from typing import NamedTuple


class Op(enum.IntEnum):
    """What a mutation does to its key (numbers of kvrpcpb.Op)."""

    PUT = 0
    DELETE = 1
    LOCK = 2
    ROLLBACK = 3
    INSERT = 4
    PESSIMISTIC_LOCK = 5
    CHECK_NOT_EXISTS = 6


class Assertion(enum.IntEnum):
    """What the client believes about a key (numbers of kvrpcpb.Assertion)."""

    NONE = 0
    EXIST = 1
    NOT_EXIST = 2


class Mutation(NamedTuple):
    """One key of a transaction; `key` is the raw user key."""

    op: int
    key: bytes
    value: bytes = b""
    assertion: int = Assertion.NONE
