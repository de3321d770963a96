"""The storage on disk: ordered key-value stores, the value log, metadata, the MVCC store, Pump
storage.
"""
