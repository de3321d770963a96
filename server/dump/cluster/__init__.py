"""Dumps of the cluster's own tables: chunks at snapshots of their own,
under a hold of their table's resolved_ts.
"""
