"""Copies the existing rows of tables into a running changefeed, chunk by chunk, while its log goes
on.
"""
