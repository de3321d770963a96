"""What a cluster is made of: stores, regions, ids, shared settings;
and the calls of PD about them.
"""
