"""The transactional store: Percolator over an ordered key-value store, snapshot reads,
change events, GC.

Way of a write: a command (`command`) is decided (`percolator`, `pessimistic`, `status`) against a
`Draft` of the current group, the group becomes one synced batch (`engine`, `group_commit`), then
its changes go to the observers.
"""
