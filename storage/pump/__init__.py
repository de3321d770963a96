"""Pump storage: TiDB binlogs in a value log, their order in LevelDB,
prewrites matched with their commits.
"""
