"""SINK MANAGER: decides which table moves next, within the memory quota,
and hands sorted changes to Spark.
"""
