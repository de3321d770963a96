"""The tables that a changefeed takes, followed through the schema changes of its source."""
