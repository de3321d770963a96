"""Prometheus metrics of the store's transactions."""

from prometheus_client import Counter

LOCK_WAITS = Counter("tidemark_store_lock_waits_total", "Times a pessimistic lock request began to wait for a key.")
DEADLOCKS = Counter("tidemark_store_deadlocks_total", "Pessimistic lock requests refused because they would deadlock.")
