"""The audit: a lake is compared with its source all the time, slowly, range by range (docs/design/0030)."""
