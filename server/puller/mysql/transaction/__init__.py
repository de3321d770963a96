"""Finds the committed transactions among the events of a log, in the order of the log."""
