"""Metadata: the etcd v3 API as a client (`client`),
and as an embedded single-node server (`embedded`).
"""
