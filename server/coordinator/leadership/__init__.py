"""The right to answer and to write, and who has it:
every room of the coordinator leans on it (docs/design/0009).
"""
