"""Arrow Flight: how Spark asks for cuts, reads their rows,
and acknowledges them (docs/format/flight.md).
"""
