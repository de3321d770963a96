"""Lakes in databases, read in one snapshot, without Spark."""
