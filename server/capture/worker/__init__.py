"""One capture on many cores: worker processes that pull, sort and serve the tables,
and what makes them one again.
"""
