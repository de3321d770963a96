"""The coordinator: PD's services and etcd's API on one port,
over real etcd or an embedded LevelDB.
"""
