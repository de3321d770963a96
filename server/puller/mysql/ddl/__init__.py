"""Statements of the log: tokens, a tree, and what the tables are after it. Without I/O."""
