"""Copying what tables already hold into a running changefeed, chunk by chunk,
while its log goes on.
"""
