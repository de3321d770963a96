"""MySQL's and MariaDB's binlog: events, schemas, and rows decoded column by column into Arrow.

Pure.
"""
