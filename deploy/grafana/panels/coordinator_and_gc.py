"""The dashboard about coordinator, store and GC."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import quantile, rate

COORDINATOR_AND_GC: Final = Dashboard(
    name="coordinator-and-gc",
    title="Tidemark: coordinator, store and GC",
    text="Leadership, timestamps and metadata; transactions of our own store; what GC may remove.",
    rows=(
        Row(
            title="Coordinator",
            panels=(
                Panel(
                    title="Leader",
                    queries={"{{instance}}": "tidemark_coordinator_leader"},
                    text="1 for the one that leads. None: PD's calls are refused.",
                ),
                Panel(
                    title="Elections",
                    queries={
                        "{{instance}}": "sum by (instance) "
                        "(increase(tidemark_coordinator_terms_total[$__rate_interval]))"
                    },
                    text="Terms that began. Many: etcd is slow, or the leader's machine stalls.",
                ),
                Panel(
                    title="Timestamps (TSO)",
                    unit="cps",
                    queries={"{{instance}}": rate("tidemark_coordinator_tso_total", "instance")},
                    text="Timestamps handed out.",
                ),
                Panel(
                    title="Stores and regions",
                    queries={
                        "stores": "max(tidemark_coordinator_stores)",
                        "regions": "max(tidemark_coordinator_regions)",
                    },
                    text="What the leader knows.",
                ),
                Panel(
                    title="Region heartbeats",
                    unit="cps",
                    queries={"heartbeats": rate("tidemark_coordinator_region_heartbeats_total")},
                    text="From stores to the leader.",
                ),
                Panel(
                    title="Safepoint updates",
                    unit="cps",
                    queries={
                        "answered": rate("tidemark_gcsafepoint_updates_total"),
                        "written": rate("tidemark_gcsafepoint_transactions_total"),
                    },
                    text="Many updates share one transaction of the metadata.",
                ),
            ),
        ),
        Row(
            title="Embedded metadata (without etcd)",
            panels=(
                Panel(
                    title="Changes",
                    unit="cps",
                    queries={
                        "revisions": "sum(rate("
                        "tidemark_coordinator_metadata_revision[$__rate_interval]))"
                    },
                    text="Durable revisions.",
                ),
                Panel(
                    title="Size",
                    unit="bytes",
                    queries={
                        "{{kind}}": "sum by (kind) (tidemark_coordinator_metadata_bytes)",
                    },
                    text="Pairs of now, and the changes that are kept for watchers.",
                ),
                Panel(
                    title="Leases, watchers, waiting requests",
                    queries={
                        "leases": "sum(tidemark_coordinator_metadata_leases)",
                        "watchers": "sum(tidemark_coordinator_metadata_watchers)",
                        "waiting requests": "sum(tidemark_coordinator_metadata_waiting_requests)",
                    },
                    text="Requests that wait for long: the disk is slow.",
                ),
            ),
        ),
        Row(
            title="GC",
            panels=(
                Panel(
                    title="Age of the safepoints",
                    unit="s",
                    queries={"{{type}}": "time() - tidemark_gcsafepoint_timestamp_seconds"},
                    text="Older versions of rows than this may be removed.",
                ),
                Panel(
                    title="What holds GC back",
                    unit="s",
                    queries={"{{scope}} {{barrier_id}}": "tidemark:gc_barrier_age:seconds"},
                    text="`tidemark cli gc explain` says how to end each. After a day that a "
                    "changefeed does not move, GC goes on without it.",
                ),
                Panel(
                    title="Rounds",
                    queries={
                        "{{result}}": "sum by (result) "
                        "(increase(tidemark_gc_rounds_total[$__rate_interval]))"
                    },
                    text="Rounds of the GC worker that ended, every ten minutes by default.",
                ),
                Panel(
                    title="Time of the stages",
                    unit="s",
                    queries={
                        "{{stage}}": "sum by (stage) (tidb_tikvclient_gc_seconds_sum)"
                        " / sum by (stage) (tidb_tikvclient_gc_seconds_count)"
                    },
                    text="The mean of all rounds since the worker started.",
                ),
                Panel(
                    title="Locks resolved",
                    unit="cps",
                    queries={"locks": rate("tidemark_gc_resolved_locks_total")},
                    text="Locks of clients that are gone, below the safepoint.",
                ),
                Panel(
                    title="Versions in the store",
                    unit="cps",
                    queries={"{{tag}}": rate("tikv_gcworker_gc_keys", "tag", 'cf="write"')},
                    text="Total: looked at by the store's GC. Deleted: removed.",
                ),
            ),
        ),
        Row(
            title="Store",
            panels=(
                Panel(
                    title="Commands of a synced group",
                    queries={
                        "mean": f"{rate('tidemark_store_group_commands_sum')}"
                        f" / {rate('tidemark_store_group_commands_count')}"
                    },
                    text="Write commands that share one sync of the disk.",
                ),
                Panel(
                    title="Time of a group",
                    unit="s",
                    queries={
                        "median": quantile(0.5, "tidemark_store_group_duration_seconds"),
                        "99 %": quantile(0.99, "tidemark_store_group_duration_seconds"),
                    },
                    text="To decide and to sync it.",
                ),
                Panel(
                    title="Locks",
                    queries={
                        "open": "sum(tidemark_store_open_locks)",
                        "waits a second": rate("tidemark_store_lock_waits_total"),
                        "deadlocks a second": rate("tidemark_store_deadlocks_total"),
                    },
                    text="Open: of transactions that are neither committed nor rolled back.",
                ),
                Panel(
                    title="Change feed",
                    unit="cps",
                    queries={
                        "rows": rate("tidemark_store_feed_rows_total"),
                        "cut, as too slow": rate("tidemark_store_feed_congested_total"),
                    },
                    text="Rows queued for captures.",
                ),
                Panel(
                    title="Change feed, waiting",
                    unit="bytes",
                    queries={"{{instance}}": "tidemark_store_feed_queued_bytes"},
                    text="Changes that wait for slow readers (--feed-memory-bytes).",
                ),
                Panel(
                    title="Regions, and their changes",
                    queries={
                        "regions": "sum(tidemark_store_regions)",
                        "splits": "sum(tidemark_store_region_splits_total)",
                        "merges": "sum(tidemark_store_region_merges_total)",
                    },
                    text="Splits and merges since the stores started.",
                ),
            ),
        ),
    ),
)
