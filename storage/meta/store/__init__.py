"""The core of embedded metadata: etcd's state with its history, leases and watches, pure; and their
form on disk.
"""
