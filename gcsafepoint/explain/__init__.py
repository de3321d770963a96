"""Who blocks GC, why, until when, and what ends it:
from a frozen situation to ordered chains of links. Pure.
"""
