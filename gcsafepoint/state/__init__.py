"""The GC state that the coordinator keeps: its rules, the RPCs that change it,
and how it is stored.
"""
