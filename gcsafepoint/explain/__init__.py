"""Explains GC: what holds it back, why, until when, and what ends that; from a frozen situation to
ordered chains of links. Pure.
"""
