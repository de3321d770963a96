"""The store daemon: `tikvpb.Tikv` and `cdcpb.ChangeData` in front of `storage.mvcc`."""
