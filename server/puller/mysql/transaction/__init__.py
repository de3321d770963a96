"""Events to committed transactions, in the order of the log."""
