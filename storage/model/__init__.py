"""The value types that all rooms share: timestamps, spans, event batches, errors.

Pure: no clock, no I/O.
"""
