"""TiDB's encodings: keys, table schemas, rows and the values in them.

Pure: bytes in, values out.
"""
