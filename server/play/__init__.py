"""`tidemark play`: a MariaDB with a shop that keeps changing, a changefeed of it,
and a lake to query with SQL.
"""
