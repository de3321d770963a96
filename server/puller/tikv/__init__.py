"""The TiKV source: `cdcpb.ChangeData`, one event feed per store, one puller per table span."""
