"""From the events of a log to its committed transactions, in the order of the log."""
