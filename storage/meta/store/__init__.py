"""The core of embedded metadata: etcd's state, leases, watches and history, pure;
their form on disk; group commit.
"""
