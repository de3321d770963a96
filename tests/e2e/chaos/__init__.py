"""Checks in the manner of Jepsen: a whole cluster of real processes, a workload, one timeline of
faults, one verdict. `python -m tests.e2e.chaos --help` tells how to run them.
"""
