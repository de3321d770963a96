"""The cluster's stores, regions, ids and shared settings, and PD's calls about them."""
