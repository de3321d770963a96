"""Metrics of the native listener."""

from prometheus_client import Counter, Gauge

CONNECTIONS = Gauge("tidemark_rpc_connections", "Connections that are open, or being set up")
FAULTS = Counter("tidemark_rpc_connection_faults_total", "Connections ended because their peer broke HTTP/2", ["code"])
