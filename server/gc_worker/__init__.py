"""`tidemark gc-worker`: the worker of `gcsafepoint.worker`, connected to a coordinator,
its metadata and its stores.
"""
