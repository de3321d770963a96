"""PD's HTTP API on the client port, as far as TiDB, pd-ctl and scripts use it
(docs/design/0011-pd-surface.md).
"""
