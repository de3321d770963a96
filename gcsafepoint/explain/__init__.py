"""Explains GC: its blockers, their causes, ends and remedies; from a frozen situation to ordered
chains of links. Pure.
"""
