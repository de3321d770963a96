"""The pump daemon: speaks `binlog.Pump` to TiDB and Drainer,
keeps its binlogs in `storage.pump`.
"""
