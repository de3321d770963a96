"""Pullers: from an upstream's change stream to raw event batches in the sorter;
a package for each source protocol.
"""
