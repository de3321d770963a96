"""The grammar of the log's statements, by noun: a reader for each, over the same tokens."""
