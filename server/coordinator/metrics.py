"""What the coordinator counts; the safepoints' own numbers are in `gcsafepoint.state.metrics`."""

from prometheus_client import Counter, Gauge

TSO_TOTAL = Counter("tidemark_coordinator_tso_total", "Timestamps handed out")
REGION_HEARTBEATS_TOTAL = Counter("tidemark_coordinator_region_heartbeats_total", "Region heartbeats received")
REGIONS = Gauge("tidemark_coordinator_regions", "Regions known")
STORES = Gauge("tidemark_coordinator_stores", "Stores known")
LEADER = Gauge("tidemark_coordinator_leader", "1 while this coordinator leads")
TERMS_TOTAL = Counter("tidemark_coordinator_terms_total", "Terms of leadership begun")
