"""The change feed (`cdcpb.ChangeData`): subscriptions, their scans,
live changes and resolved timestamps.
"""
