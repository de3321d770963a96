"""What changefeeds replicate from, by the scheme of the source URI:
each source is a puller with its dump.
"""
