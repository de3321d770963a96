"""Metrics of listeners: which connections were refused and evicted, of all; the rest,
of the native ones.
"""

from prometheus_client import Counter, Gauge

CONNECTIONS = Gauge("tidemark_rpc_connections", "Connections that are open, or being set up")
ERRORS = Counter(
    "tidemark_rpc_connection_errors_total",
    "Connections ended by an unexpected exception of the server; its log has it",
)
REFUSED = Counter(
    "tidemark_rpc_connections_refused_total",
    "Connections refused because all, or all that their address may have, are in use, or too many "
    "wait to be set up",
)
EVICTED = Counter(
    "tidemark_rpc_connections_evicted_total",
    "Connections closed to make room: `idle` for new ones, `unread` for memory that their unread "
    "answers took, `guard` those beyond an address's share, or the port's bound, where gRPC or "
    "Flight listen themselves",
    ["reason"],
)
FAULTS = Counter(
    "tidemark_rpc_connection_faults_total",
    "Connections ended because their peer broke HTTP/2",
    ["code"],
)
NAMES_REFUSED = Counter(
    "tidemark_rpc_names_refused_total",
    "Calls and requests refused because the client's certificate has a common name that is not in "
    "cert-allowed-cn",
)
CERTIFICATE_RELOADS = Counter(
    "tidemark_rpc_certificate_reloads_total",
    "Changes of a listener's TLS files: `ok` if it uses the new ones, `failed` if they cannot be "
    "used",
    ["outcome"],
)
ACCESS_REFUSED = Counter(
    "tidemark_rpc_access_refused_total",
    "Calls and requests refused to clients: `unauthenticated` if nobody knows who calls, "
    "`unauthorized` if the client's role or changefeeds do not allow it",
    ["reason"],
)
ACCESS_RELOADS = Counter(
    "tidemark_rpc_access_reloads_total",
    "Changes of the file with the clients: `ok` if it is used, `failed` if it cannot be",
    ["outcome"],
)
