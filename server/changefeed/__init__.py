"""What a changefeed is: its record and where that lies in the metadata, its filter,
and its tables over time.
"""
