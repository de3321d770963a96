"""Delta tables: one Delta commit a table and cut, fenced by the cut's end,
in each of the three modes.

Invariants:
1. A commit carries the Delta transaction (`tidemark:<changefeed>`, end_ts): Delta itself refuses it
   a second time, and a table says up to where it has been applied. The fence belongs to the
   changefeed's time, not to Spark's batch numbers, so it also holds when a checkpoint directory is
   lost.
2. A table changes from one cut to the next in one commit; no version shows half a cut.
Why not one MERGE for all: docs/design/0007-lake-apply.md.
"""
