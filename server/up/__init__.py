"""`tidemark up`: all daemons as one process tree on this machine, with embedded metadata."""
