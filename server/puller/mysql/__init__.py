"""The log of a MySQL-protocol server (MySQL, MariaDB), followed for one changefeed.

session/      a login at the server: settings, catalogue, errors, the checks before a start
log/          the stream of events: where to begin, packets, positions, accepted times
transaction/  which events are one transaction, and its commit_ts
ddl/          statements as trees, and what a table is after each
puller        brings all of it together: `rows`, `tables` and `ddl_changes` go to the changefeed
"""
