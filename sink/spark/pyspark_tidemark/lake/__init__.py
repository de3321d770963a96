"""The lake: whole cuts of a changefeed applied exactly once.

Targets are Delta and Iceberg tables, Parquet changelogs, and tables in PostgreSQL or MySQL.
"""
