"""Mode `scd2` of a cut that the driver holds: the versions that its changes begin,
and when older ones end. Pure.

Invariant: a key changes at most once in a transaction, so (_commit_ts, _seq) orders the changes of
a key.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_tidemark.lake.changes import DELETE, INSERT
from pyspark_tidemark.lake.mode import IS_CURRENT, VALID_FROM, VALID_TO


def versions(changes: Any, key: Sequence[str]) -> Any:
    """The rows that changes begin, with their times;
    those that end at the commit_ts of their begin are left out.
    """
    ordered = _ordered(changes, key)
    begin = ordered["_commit_ts"].combine_chunks()
    after = pa.concat_arrays([begin[1:], pa.nulls(min(1, len(begin)), begin.type)])
    end = pc.if_else(_goes_on(ordered, key), after, pa.scalar(None, begin.type))
    timed = ordered.append_column(VALID_FROM, begin).append_column(VALID_TO, end)
    timed = timed.append_column(IS_CURRENT, pc.is_null(end))
    lasting = pc.or_kleene(pc.is_null(end), pc.greater(end, begin))
    return timed.filter(pc.and_(pc.not_equal(ordered["_op"], DELETE), lasting))


def endings(changes: Any, key: Sequence[str]) -> tuple[Any, Any]:
    """For each key that was there before when its version ended,
    and for each other key when it was inserted.

    Both have the key's columns and VALID_TO.
    """
    ordered = _ordered(changes, key)
    goes_on = _goes_on(ordered, key)
    first = pc.invert(pa.concat_arrays([_no(ordered), goes_on[:-1]]))
    timed = ordered.select([*key, "_commit_ts"]).rename_columns([*key, VALID_TO])
    is_new = pc.equal(ordered["_op"], INSERT)
    return timed.filter(pc.and_(first, pc.invert(is_new))), timed.filter(pc.and_(first, is_new))


def _ordered(changes: Any, key: Sequence[str]) -> Any:
    return changes.sort_by([(name, "ascending") for name in (*key, "_commit_ts", "_seq")])


def _goes_on(ordered: Any, key: Sequence[str]) -> Any:
    """For each change whether the next one is of the same key."""
    columns = [ordered[name].combine_chunks() for name in key]
    same = reduce(pc.and_, (pc.equal(column[:-1], column[1:]) for column in columns))
    return pa.concat_arrays([same, _no(ordered)])


def _no(ordered: Any) -> Any:
    """One false, or nothing where there is nothing."""
    return pa.array([False] * min(1, len(ordered)), pa.bool_())
