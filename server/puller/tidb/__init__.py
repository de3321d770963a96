"""TiDB clusters as a source: their schemas from the store, schema changes,
and tables of partitions.
"""
