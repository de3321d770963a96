"""The log of a MySQL-protocol server (MySQL, MariaDB): transport, transactions,
schema by log position, preflight.
"""
