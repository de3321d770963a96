"""Parquet changelogs: every change of a table, one directory a cut, on this machine's file systems
(`changelog`) or behind Hadoop's (`remote`).
"""
