"""The GC worker: who leads, up to which timestamp history may go, and the three phases of a round.

No gRPC here.
"""
