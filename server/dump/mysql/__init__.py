"""Dumps woven into the log of a MySQL or MariaDB server: chunks between written watermarks (seed 003)."""
