"""The command line: a module for each group of `tidemark cli`,
and `daemon` for the commands that run daemons.
"""
