"""PD's calls about GC and keyspaces: messages and statuses; the rules are in `gcsafepoint`."""
