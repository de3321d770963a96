"""What embedded metadata holds, read when it is scraped."""

from prometheus_client import Counter, Gauge

from storage.meta.embedded import EmbeddedEtcd

_REVISION = Gauge("tidemark_coordinator_metadata_revision", "The last durable revision")
_COMPACT_REVISION = Gauge("tidemark_coordinator_metadata_compact_revision", "The first revision whose past is kept")
_BYTES = Gauge("tidemark_coordinator_metadata_bytes", "Bytes in memory: pairs of now, kept changes", ["kind"])
_LEASES = Gauge("tidemark_coordinator_metadata_leases", "Leases held")
_WATCHERS = Gauge("tidemark_coordinator_metadata_watchers", "Streams and loops that wait for changes")
_WAITING = Gauge("tidemark_coordinator_metadata_waiting_requests", "Requests in the queue")
SLOW_WATCHES_TOTAL = Counter(
    "tidemark_coordinator_metadata_slow_watches_total", "Watches cancelled because what they had not seen was forgotten"
)


def expose(etcd: EmbeddedEtcd) -> None:
    """Let the gauges show `etcd`."""
    _REVISION.set_function(lambda: etcd.statistics().revision)
    _COMPACT_REVISION.set_function(lambda: etcd.statistics().compact_revision)
    _BYTES.labels("pairs").set_function(lambda: etcd.statistics().live_bytes)
    _BYTES.labels("history").set_function(lambda: etcd.statistics().log_bytes)
    _LEASES.set_function(lambda: etcd.statistics().leases)
    _WATCHERS.set_function(lambda: etcd.statistics().watchers)
    _WAITING.set_function(lambda: etcd.statistics().waiting)
