"""The GC worker: its election, the bound up to which history may go, and the three phases of a
round.

No gRPC here.
"""
