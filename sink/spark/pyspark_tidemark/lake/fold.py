"""The net effect of a cut's changes: each key's last change (mode `upsert`), or the versions of
rows that begin and end (mode `scd2`).

Each function exists twice: for changes in the driver's memory (pyarrow.Table), and for those that
only executors read (`…_frame`).

Invariant: a key changes at most once in a transaction, so (_commit_ts, _seq) orders the changes of
a key.
"""

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake.changes import DELETE, INSERT
from pyspark_tidemark.lake.columns import internal, quoted
from pyspark_tidemark.lake.keys import renamed
from pyspark_tidemark.lake.schema import IS_CURRENT, VALID_FROM, VALID_TO

FIRST_OP = internal("_first_op")
"""A column with the op of a key's first change in a cut."""
ENDS = internal("_ends")
"""A column with the commit_ts at which a version ends."""
_FIRST, _LAST = internal("_first"), internal("_last")
_ORDER = [("_commit_ts", "ascending"), ("_seq", "ascending")]
_LARGE = 1 << 31
"""Two numbers up to it can be combined in one of 64 bits."""


@dataclasses.dataclass(frozen=True)
class Folded:
    """The net effect of a cut on one table."""

    last: Any
    """The last change of each key (pyarrow.Table with the envelope), in commit order."""
    existing: Any
    """The keys in `last` that were there before the cut: their first change is no insert."""
    new: Any
    """The keys in `last` that were not there before the cut, as far as the upstream says."""

    @property
    def live(self) -> Any:
        """The rows that the lake must hold after the cut."""
        stays = pc.not_equal(self.last["_op"], DELETE)
        return self.last if pc.all(stays, min_count=0).as_py() else self.last.filter(stays)


def fold(changes: Any, key: Sequence[str]) -> Folded:
    """Fold a pyarrow.Table of changes by `key`."""
    ordered = _in_commit_order(changes)
    is_last, first = _ends(_key_numbers(ordered, key))
    # Rows are wide, and most of a dump's cuts have each key once: these are not copied.
    last = ordered if is_last.all() else ordered.filter(pa.array(is_last))
    # The first change, not the last: a key that was updated and then deleted was there before, one
    # that was inserted and then updated was not.
    is_new = pc.equal(ordered["_op"].take(pa.array(first)), INSERT)
    keys = last.select(list(key))
    return Folded(last, keys.filter(pc.invert(is_new)), keys.filter(is_new))


def _in_commit_order(changes: Any) -> Any:
    """The same changes; captures send them so, slice by slice."""
    commit_ts, seq = (changes[name].to_numpy() for name, _ in _ORDER)
    follows = commit_ts[1:] > commit_ts[:-1]
    follows |= (commit_ts[1:] == commit_ts[:-1]) & (seq[1:] >= seq[:-1])
    return changes if follows.all() else changes.sort_by(_ORDER)


def _key_numbers(changes: Any, key: Sequence[str]) -> Any:
    """For each change a number (NumPy) that is the same for the same key, and for no other."""
    columns = [changes[name].combine_chunks() for name in key]
    if len(columns) == 1 and pa.types.is_integer(columns[0].type) and not columns[0].null_count:
        return columns[0].to_numpy()
    numbers, most = np.zeros(len(changes), np.int64), 1
    for column in columns:
        coded = column.dictionary_encode(null_encoding="encode")
        numbers = numbers * len(coded.dictionary) + coded.indices.to_numpy()
        most *= max(1, len(coded.dictionary))
        if most > _LARGE:
            distinct, numbers = np.unique(numbers, return_inverse=True)
            most = len(distinct)
    return numbers


def _ends(numbers: Any) -> tuple[Any, Any]:
    """For each change whether it is the last with its number; and for each of these, in order, the
    place of the first one.
    """
    by_number, count = np.argsort(numbers, kind="stable"), len(numbers)
    begins, ends = np.ones(count, bool), np.ones(count, bool)
    begins[1:] = ends[:-1] = np.diff(numbers[by_number]) != 0
    is_last, first = np.zeros(count, bool), np.empty(count, np.int64)
    is_last[by_number[ends]], first[by_number[ends]] = True, by_number[begins]
    return is_last, first[is_last]


def fold_frame(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """The last change of each key and the FIRST_OP of its changes, computed by the executors."""
    order = F.struct("_commit_ts", "_seq")
    change = F.struct(*_columns(changes.columns))
    last = changes.groupBy(*_columns(key)).agg(
        F.max_by(change, order).alias(_LAST),
        F.min_by("_op", order).alias(FIRST_OP),
    )
    return last.select(f"{quoted(_LAST)}.*", quoted(FIRST_OP))


def met_keys(table: DataFrame, inserted: DataFrame, key: Sequence[str]) -> int:
    """How many keys of `table` are among those of `inserted`; both have the key's columns only."""
    there, new = table.alias("t"), inserted.alias("s")
    same = [F.col(f"t.{quoted(name)}") == F.col(f"s.{quoted(name)}") for name in key]
    return int(there.join(new, same, "left_semi").distinct().count())


def versions(changes: Any, key: Sequence[str]) -> Any:
    """The rows that changes begin, with their times.

    Those that end at the commit_ts of their begin are left out: no ts shows them.
    """
    ordered = _by_key(changes, key)
    begin = ordered["_commit_ts"].combine_chunks()
    after = pa.concat_arrays([begin[1:], pa.nulls(min(1, len(begin)), begin.type)])
    end = pc.if_else(_goes_on(ordered, key), after, pa.scalar(None, begin.type))
    timed = ordered.append_column(VALID_FROM, begin).append_column(VALID_TO, end)
    timed = timed.append_column(IS_CURRENT, pc.is_null(end))
    lasting = pc.or_kleene(pc.is_null(end), pc.greater(end, begin))
    return timed.filter(pc.and_(pc.not_equal(ordered["_op"], DELETE), lasting))


def versions_frame(changes: DataFrame, key: Sequence[str], columns: Sequence[str]) -> DataFrame:
    """As `versions`, with these columns."""
    order = Window.partitionBy(*_columns(key)).orderBy("_commit_ts", "_seq")
    timed = (
        changes.withColumn(VALID_TO, F.lead("_commit_ts").over(order))
        .withColumn(VALID_FROM, F.col("_commit_ts"))
        .withColumn(IS_CURRENT, F.col(VALID_TO).isNull())
    )
    lasting = timed.where(
        f"_op <> '{DELETE}' AND ({VALID_TO} IS NULL OR {VALID_TO} > {VALID_FROM})"
    )
    return lasting.select(*_columns(columns))


def endings(changes: Any, key: Sequence[str]) -> tuple[Any, Any]:
    """For each key that was there before when its version ended,
    and for each other key when it was inserted.

    Both have the key's columns and VALID_TO.
    """
    ordered = _by_key(changes, key)
    goes_on = _goes_on(ordered, key)
    first = pc.invert(pa.concat_arrays([_no(ordered), goes_on[:-1]]))
    timed = ordered.select([*key, "_commit_ts"]).rename_columns([*key, VALID_TO])
    is_new = pc.equal(ordered["_op"], INSERT)
    return timed.filter(pc.and_(first, pc.invert(is_new))), timed.filter(pc.and_(first, is_new))


def endings_frame(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """For each key when the version ENDS that may be there before; of an insert, too: only what
    matches is ended.
    """
    first = F.min(F.struct("_commit_ts", "_seq")).alias(_FIRST)
    ended = changes.groupBy(*_columns(key)).agg(first)
    return ended.select(*_columns(key), F.col(f"{quoted(_FIRST)}._commit_ts").alias(ENDS))


def _by_key(changes: Any, key: Sequence[str]) -> Any:
    keys = renamed(changes.select(list(key)))
    by = [(name, "ascending") for name in keys.column_names] + _ORDER
    for name, _ in _ORDER:
        keys = keys.append_column(name, changes[name])
    return changes.take(pc.sort_indices(keys, sort_keys=by))


def _goes_on(ordered: Any, key: Sequence[str]) -> Any:
    """For each change whether the next one is of the same key."""
    columns = [ordered[name].combine_chunks() for name in key]
    same = reduce(pc.and_, (pc.equal(column[:-1], column[1:]) for column in columns))
    return pa.concat_arrays([same, _no(ordered)])


def _no(ordered: Any) -> Any:
    """One false, or nothing where there is nothing."""
    return pa.array([False] * min(1, len(ordered)), pa.bool_())


def _columns(names: Sequence[str]) -> list[Column]:
    return [F.col(quoted(name)) for name in names]
