"""Fold a table's changes to the last one of each key: what the lake must hold,
and which of its rows must go.

Invariant: a key changes at most once in a transaction, so (_commit_ts, _seq) orders the changes of
a key.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from pyspark_tidemark.lake.changes import DELETE, INSERT
from pyspark_tidemark.lake.predicate import quoted

_ORDER = [("_commit_ts", "ascending"), ("_seq", "ascending")]


@dataclasses.dataclass(frozen=True)
class Folded:
    """The net effect of a cut on one table."""

    last: Any
    """The last change of each key (pyarrow.Table with the envelope), in commit order."""
    known: Any
    """The part of `last` whose keys were there before the cut: their first change is no insert."""
    new: Any
    """The part of `last` whose keys were not there before the cut, as far as the upstream says."""

    @property
    def live(self) -> Any:
        """The rows that the lake must hold after the cut."""
        return self.last.filter(pc.not_equal(self.last["_op"], DELETE))


def fold(changes: Any, key: Sequence[str]) -> Folded:
    """Fold a pyarrow.Table of changes by `key`."""
    ordered = changes.sort_by(_ORDER)
    # The key's columns go by number: one of them may be called "row".
    keys = ordered.select(list(key)).rename_columns([f"key {place}" for place in range(len(key))])
    numbered = keys.append_column("row", pa.array(range(len(ordered)), pa.int64()))
    grouped = numbered.group_by(keys.column_names, use_threads=False).aggregate(
        [("row", "max"), ("row", "min")]
    )
    grouped = grouped.sort_by("row_max")
    last = ordered.take(grouped["row_max"])
    first_op = ordered["_op"].take(grouped["row_min"])
    is_new = pc.equal(first_op, INSERT)
    return Folded(last, last.filter(pc.invert(is_new)), last.filter(is_new))


def fold_frame(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """The last change of each key and the `_first_op` of its changes, computed by the executors."""
    order = F.struct("_commit_ts", "_seq")
    last = changes.groupBy(*[F.col(quoted(name)) for name in key]).agg(
        F.max_by(F.struct(*[F.col(quoted(name)) for name in changes.columns]), order).alias(
            "_last"
        ),
        F.min_by("_op", order).alias("_first_op"),
    )
    return last.select("_last.*", "_first_op")


def met_keys(table: DataFrame, inserted: DataFrame, key: Sequence[str]) -> int:
    """How many keys of `table` are among those of `inserted`; both have the key's columns only."""
    there, new = table.alias("t"), inserted.alias("s")
    same = [F.col(f"t.{quoted(name)}") == F.col(f"s.{quoted(name)}") for name in key]
    return int(there.join(new, same, "left_semi").distinct().count())
