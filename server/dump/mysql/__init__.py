"""Dumps woven into the log of a MySQL or MariaDB server:
chunks between written watermarks; docs/design/0022.
"""
