"""The lake: whole cuts of a changefeed applied to Delta tables or to a Parquet changelog,
exactly once.
"""
