"""A server's log: opened at a position, read as it arrives, and known again after a restart."""
