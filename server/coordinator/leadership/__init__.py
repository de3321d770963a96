"""Leadership: the right to answer and to write, on which every room of the coordinator depends
(docs/design/0009).
"""
