"""SORTER: row changes of a table, in any order, come out sorted by (commit_ts, start_ts, op, key)."""
