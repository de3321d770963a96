"""The transactional store: Percolator over an ordered key-value store, snapshot reads,
change events, GC.

Way of a write: a command is decided (`prewrite`, `percolator`, `pessimistic`, `raw`) against the
`Draft` of the current group, the group becomes one synced batch (`engine`, `group_commit`), then
its changes go to the observers. Way of a read: it enters the `read_fence`, then looks at a frozen
`snapshot`. Records and keys are in `record`.
"""
