"""The etcd API on the coordinator's port: answered from embedded metadata (`service`),
or passed on (`proxy`).
"""
