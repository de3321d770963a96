"""TiDB's binlogs as a source: every registered pump is read,
and their transactions are merged by commit_ts.
"""
