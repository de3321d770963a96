"""`tidemark demo`: a bank whose transfers flow into the lake,
and the proof that the lake equals the store.
"""
