"""A changefeed's own facts: its record and its keys in the metadata, its filter, and its tables
over time.
"""
