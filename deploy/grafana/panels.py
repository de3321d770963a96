"""The dashboards: what each panel asks Prometheus, and what its answer means.

`$changefeed` is what one chose at the top of a dashboard; rates are over `$__rate_interval`, which
Grafana makes at least four scrapes long.
"""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    """How fast a counter grows, summed by some labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantile(share: float, histogram: str, by: str = "", labels: str = "") -> str:
    """A quantile of a histogram's observations of late."""
    grouped = f"le, {by}" if by else "le"
    rate = f"rate({histogram}_bucket{{{labels}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({grouped}) ({rate}))"


def _mean(histogram: str, by: str, labels: str = "") -> str:
    """The mean of a histogram's observations of late."""
    return f"{_rate(f'{histogram}_sum', by, labels)} / {_rate(f'{histogram}_count', by, labels)}"


_CHOSEN: Final = 'changefeed=~"$changefeed"'
_RUNS: Final = 'daemon!=""'

OVERVIEW: Final = Dashboard(
    name="overview",
    title="Tidemark: overview",
    text="Whether everything runs, how far the lakes are behind, and what the processes take.",
    rows=(
        Row(
            title="Now",
            panels=(
                Panel(
                    title="Daemons",
                    kind="stat",
                    width=4,
                    queries={"": f"count(process_start_time_seconds{{{_RUNS}}})"},
                    text="Processes that answered the last scrape.",
                ),
                Panel(
                    title="Changefeeds that run",
                    kind="stat",
                    width=4,
                    queries={"": 'sum(tidemark_capture_changefeed_state{state="normal"})'},
                    text="In state normal. `tidemark cli changefeed list` shows all.",
                ),
                Panel(
                    title="Changefeeds in trouble",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={"": 'sum(tidemark_capture_changefeed_state{state=~"warning|failed"})'},
                    text="In state warning or failed: `tidemark cli changefeed query -c ID` says why.",
                ),
                Panel(
                    title="Largest checkpoint lag",
                    kind="stat",
                    width=4,
                    unit="s",
                    red_from=600,
                    queries={"": "max(tidemark_capture_checkpoint_lag_seconds)"},
                    text="Of all changefeeds: how old the newest change is that is surely in its lake.",
                ),
                Panel(
                    title="Lake jobs in trouble",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={
                        "": 'sum(tidemark_capture_job_state{state=~"retrying|failed|silent"})'
                    },
                    text="Jobs that are started again and again, gave up, or do not report any more.",
                ),
                Panel(
                    title="Alerts that fire",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={
                        "": 'count(ALERTS{alertstate="firing",alertname=~"Tidemark.+"})'
                        " or vector(0)"
                    },
                    text="docs/runbooks.md says what to do about each.",
                ),
            ),
        ),
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Checkpoint lag",
                    unit="s",
                    queries={"{{changefeed}}": "tidemark_capture_checkpoint_lag_seconds"},
                    text="Wall clock minus checkpoint_ts: everything older is in the lake.",
                ),
                Panel(
                    title="Lag of the lake",
                    unit="s",
                    queries={"{{changefeed}}": "tidemark_spark_lag_seconds"},
                    text="Wall clock minus the newest cut that readers of the lake see.",
                ),
                Panel(
                    title="Safepoints",
                    unit="s",
                    queries={
                        "{{type}}": "time() - tidemark_gcsafepoint_timestamp_seconds > 0",
                    },
                    text="How old the history is that the database still keeps.",
                ),
            ),
        ),
        Row(
            title="Rows",
            panels=(
                Panel(
                    title="Row changes from the sources",
                    unit="cps",
                    queries={"{{daemon}}": _rate("tidemark_puller_rows_total", "daemon", _RUNS)},
                    text="What captures receive, before repeated rows are dropped.",
                ),
                Panel(
                    title="Row changes to readers",
                    unit="cps",
                    queries={"{{daemon}}": _rate("tidemark_flight_rows_total", "daemon", _RUNS)},
                    text="What captures hand out by Arrow Flight.",
                ),
                Panel(
                    title="Row changes into the lakes",
                    unit="cps",
                    queries={"{{changefeed}}": _rate("tidemark_spark_rows_total", "changefeed")},
                    text="What the lake jobs have committed.",
                ),
            ),
        ),
        Row(
            title="Processes",
            panels=(
                Panel(
                    title="CPU",
                    queries={
                        "{{daemon}} {{instance}}": "rate(process_cpu_seconds_total"
                        f"{{{_RUNS}}}[$__rate_interval])"
                    },
                    text="Cores in use. Spark's JVMs are processes of their own, and not in it.",
                ),
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={
                        "{{daemon}} {{instance}}": f"process_resident_memory_bytes{{{_RUNS}}}"
                    },
                    text="Resident memory. Spark's JVMs are processes of their own, and not in it.",
                ),
                Panel(
                    title="Uptime",
                    unit="s",
                    queries={
                        "{{daemon}} {{instance}}": f"time() - process_start_time_seconds{{{_RUNS}}}"
                    },
                    text="A line that falls to zero is a restart.",
                ),
                Panel(
                    title="Open files",
                    queries={"{{daemon}} {{instance}}": f"process_open_fds{{{_RUNS}}}"},
                    text="Files and connections of the process.",
                ),
                Panel(
                    title="gRPC connections",
                    queries={"{{daemon}} {{instance}}": "tidemark_rpc_connections"},
                    text="Connections to the daemons that have the native gRPC engine.",
                ),
                Panel(
                    title="Connections refused and broken",
                    unit="cps",
                    queries={
                        "refused": _rate("tidemark_rpc_connections_refused_total"),
                        "server errors": _rate("tidemark_rpc_connection_errors_total"),
                    },
                    text="Refused: all that an address may have are in use. Server errors are logged.",
                ),
                Panel(
                    title="Clients refused",
                    unit="cps",
                    queries={
                        "TLS: {{reason}}": _rate(
                            "tidemark_rpc_tls_handshakes_refused_total", "reason"
                        ),
                        "name of the certificate": _rate("tidemark_rpc_names_refused_total"),
                        "token or role": _rate("tidemark_rpc_access_refused_total"),
                    },
                    text="At their TLS handshake, by reason, or at a call. The log names each once.",
                ),
                Panel(
                    title="Changes of certificates",
                    unit="cps",
                    queries={
                        "{{outcome}}": _rate("tidemark_rpc_certificate_reloads_total", "outcome")
                    },
                    text="Failed: files that cannot be used, and the old certificate stays.",
                ),
            ),
        ),
    ),
)

CHANGEFEED: Final = Dashboard(
    name="changefeed",
    title="Tidemark: changefeeds",
    text="The way of the changes of each changefeed, stage by stage, and its first copies.",
    changefeeds=True,
    rows=(
        Row(
            title="State",
            panels=(
                Panel(
                    title="State",
                    kind="state-timeline",
                    width=12,
                    queries={
                        "{{changefeed}} {{state}}": f"tidemark_capture_changefeed_state{{{_CHOSEN}}}"
                        " == 1"
                    },
                    text="`tidemark cli changefeed history` has the reasons.",
                ),
                Panel(
                    title="State of the lake job",
                    kind="state-timeline",
                    width=12,
                    queries={
                        "{{changefeed}} {{state}}": f"tidemark_capture_job_state{{{_CHOSEN}}} == 1"
                    },
                    text="As the job reports it to the captures; silent: it does not report any more.",
                ),
            ),
        ),
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Checkpoint and resolved lag",
                    unit="s",
                    queries={
                        "{{changefeed}} checkpoint": "tidemark_capture_checkpoint_lag_seconds"
                        f"{{{_CHOSEN}}}",
                        "{{changefeed}} resolved": "tidemark_capture_resolved_lag_seconds"
                        f"{{{_CHOSEN}}}",
                    },
                    text="Resolved: all older changes are here. Checkpoint: they are in the lake, too.",
                ),
                Panel(
                    title="Lag by stage",
                    unit="s",
                    queries={
                        "{{changefeed}} {{stage}}": "tidemark_capture_stage_lag_seconds"
                        f"{{{_CHOSEN}}}"
                    },
                    text="How far each stage is behind the one before it. The highest line is what to "
                    "look into: puller is the source, sorter the disk, sink a DDL or a dump, reader "
                    "the lake job.",
                ),
                Panel(
                    title="Not read for",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_capture_unread_seconds{{{_CHOSEN}}}",
                    },
                    text="For how long nobody has asked for the changefeed's rows.",
                ),
            ),
        ),
        Row(
            title="Pulling and sorting",
            panels=(
                Panel(
                    title="Regions",
                    queries={"{{changefeed}}": f"tidemark_capture_regions{{{_CHOSEN}}}"},
                    text="Regions of TiKV subscribed to; 0 for MySQL and Pump.",
                ),
                Panel(
                    title="Sorted rows",
                    unit="bytes",
                    queries={
                        "{{changefeed}} disk": f"tidemark_capture_sorter_disk_bytes{{{_CHOSEN}}}",
                        "{{changefeed}} memory": "tidemark_capture_sorter_memory_bytes"
                        f"{{{_CHOSEN}}}",
                        "{{changefeed}} staged": f"tidemark_capture_staged_bytes{{{_CHOSEN}}}",
                    },
                    text="Rows that wait to be acknowledged by the lake. Staged: ready for readers.",
                ),
                Panel(
                    title="The sorter's disk",
                    queries={
                        "{{changefeed}} refuses": "tidemark_capture_sorter_disk_refuses"
                        f"{{{_CHOSEN}}}",
                        "{{changefeed}} waiting calls": "tidemark_capture_sorter_waiting_calls"
                        f"{{{_CHOSEN}}}",
                    },
                    text="Anything but 0: the disk takes no rows; it is full or broken.",
                ),
                Panel(
                    title="Errors",
                    queries={
                        "{{code}}": "sum by (code) "
                        "(increase(tidemark_capture_changefeed_errors_total[$__rate_interval]))"
                    },
                    text="By their codes (docs/reference/errors.md). No line: there was none.",
                ),
                Panel(
                    title="Region faults and locks in the way",
                    unit="cps",
                    queries={
                        "locks": _rate("tidemark_puller_stuck_locks_total"),
                        "{{reason}}": _rate("tidemark_puller_region_faults_total", "reason"),
                    },
                    text="Subscriptions that ended, as at a split, and locks of clients that are gone.",
                ),
                Panel(
                    title="Captures that share the tables",
                    queries={
                        "captures": "max(tidemark_capture_sharing_captures)",
                        "owners": "sum(tidemark_capture_is_owner)",
                    },
                    text="There is one owner at any time.",
                ),
            ),
        ),
        Row(
            title="First copies (dumps)",
            panels=(
                Panel(
                    title="Rows read",
                    unit="cps",
                    queries={"rows": _rate("tidemark_dump_rows_total")},
                    text="From tables, by the dumps of all changefeeds.",
                ),
                Panel(
                    title="Bytes read",
                    unit="Bps",
                    queries={"bytes": _rate("tidemark_dump_bytes_total")},
                    text="From tables, by the dumps of all changefeeds.",
                ),
                Panel(
                    title="Tables whose dump failed",
                    queries={"{{changefeed}}": f"tidemark_dump_tables_failed{{{_CHOSEN}}}"},
                    text="`tidemark cli changefeed dumpstatus` says why.",
                ),
            ),
        ),
        Row(
            title="MySQL and MariaDB",
            panels=(
                Panel(
                    title="The server still keeps its log for",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_mysql_log_seconds_until_purge{{{_CHOSEN}}}"
                    },
                    text="From the checkpoint on, if nothing moves. At 0 the tables must be dumped anew.",
                ),
                Panel(
                    title="Age of what is read",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_puller_mysql_resolved_lag_seconds{{{_CHOSEN}}}"
                    },
                    text="Of the newest transaction of the log, by the second that the log has.",
                ),
                Panel(
                    title="Connections lost",
                    queries={
                        "{{daemon}}": "sum by (daemon) "
                        "(increase(tidemark_puller_mysql_reconnects_total[$__rate_interval]))"
                    },
                    text="Log connections that were lost or could not be opened.",
                ),
            ),
        ),
    ),
)

SORTER_AND_SINK: Final = Dashboard(
    name="sorter-and-sink",
    title="Tidemark: sorter and sink",
    text="How captures sort row changes, mount them, and hand them out by Arrow Flight.",
    rows=(
        Row(
            title="Sorter",
            panels=(
                Panel(
                    title="Rows in and out",
                    unit="cps",
                    queries={
                        "in": _rate("tidemark_sorter_rows_in_total"),
                        "out": _rate("tidemark_sorter_rows_out_total"),
                        "read from blocks": _rate("tidemark_sorter_rows_read_total"),
                    },
                    text="Rows are counted each time they are handed out. Read minus out is what was "
                    "read for nothing.",
                ),
                Panel(
                    title="Written",
                    unit="Bps",
                    queries={
                        "new": _rate("tidemark_sorter_written_bytes_total"),
                        "moved": _rate("tidemark_sorter_moved_bytes_total"),
                    },
                    text="Moved: written again, so that segments with few living rows could go.",
                ),
                Panel(
                    title="Size",
                    unit="bytes",
                    queries={
                        "disk": "sum(tidemark_sorter_disk_bytes)",
                        "memory": "sum(tidemark_sorter_memory_bytes)",
                    },
                    text="Rows whose cuts are not acknowledged yet.",
                ),
                Panel(
                    title="Blocks",
                    unit="cps",
                    queries={
                        "written": _rate("tidemark_sorter_blocks_written_total"),
                        "read": _rate("tidemark_sorter_blocks_read_total"),
                        "skipped by {{by}}": _rate("tidemark_sorter_blocks_skipped_total", "by"),
                    },
                    text="Skipped: a fetch knew from the index that it need not read them.",
                ),
                Panel(
                    title="Blocks of a fetch",
                    queries={
                        "median": _quantile(0.5, "tidemark_sorter_fetch_blocks"),
                        "99 %": _quantile(0.99, "tidemark_sorter_fetch_blocks"),
                    },
                    text="How many blocks one fetch has to read.",
                ),
                Panel(
                    title="Tables and waiting batches",
                    queries={
                        "tables": "sum(tidemark_sorter_tables)",
                        "waiting for the disk": "sum(tidemark_sorter_disk_waiting)",
                    },
                    text="Batches wait while the disk takes no rows.",
                ),
            ),
        ),
        Row(
            title="Sink manager",
            panels=(
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={
                        "in use": "sum(tidemark_sink_memory_bytes)",
                        "quota": "sum(tidemark_sink_quota_bytes)",
                    },
                    text="At the quota, tables wait for readers (--memory-quota-bytes).",
                ),
                Panel(
                    title="Age of the slowest table",
                    unit="s",
                    queries={
                        "{{timestamp}}": "max by (timestamp) "
                        "(tidemark_sink_slowest_table_age_seconds)"
                    },
                    text="A cut goes no further than the slowest table.",
                ),
                Panel(
                    title="Tasks",
                    unit="cps",
                    queries={"{{result}}": _rate("tidemark_sink_tasks_total", "result")},
                    text="Each reads a range of one table, mounts its rows and stages them.",
                ),
                Panel(
                    title="Rows read",
                    unit="cps",
                    queries={"{{source}}": _rate("tidemark_sink_rows_read_total", "source")},
                    text="Staged: they were mounted before anybody asked. Sorter: they were not.",
                ),
                Panel(
                    title="Rows of a batch",
                    queries={
                        "median": _quantile(0.5, "tidemark_sink_batch_rows"),
                        "99 %": _quantile(0.99, "tidemark_sink_batch_rows"),
                    },
                    text="Larger batches cost less for each row.",
                ),
                Panel(
                    title="Tables",
                    queries={
                        "all": "sum(tidemark_sink_tables)",
                        "failed": "sum(tidemark_sink_failed_tables)",
                        "stopped, rows were lost": "sum(tidemark_sink_rows_lost_total)",
                    },
                    text="Failed tables are read from the sorter. Lost rows are a defect: report it.",
                ),
            ),
        ),
        Row(
            title="Arrow Flight",
            panels=(
                Panel(
                    title="Calls",
                    unit="cps",
                    queries={
                        "{{call}}": _rate("tidemark_flight_call_seconds_count", "call"),
                    },
                    text="By readers: lake jobs, and programs of your own.",
                ),
                Panel(
                    title="Time of a call, 99 %",
                    unit="s",
                    queries={
                        "{{call}}": _quantile(0.99, "tidemark_flight_call_seconds", "call"),
                    },
                    text="`latest` waits for new rows, and may take as long as its reader allows.",
                ),
                Panel(
                    title="Sent",
                    unit="Bps",
                    queries={"{{daemon}}": _rate("tidemark_flight_sent_bytes_total", "daemon")},
                    text="Arrow buffers handed to readers.",
                ),
                Panel(
                    title="Acknowledgements",
                    unit="cps",
                    queries={"acks": _rate("tidemark_sink_acks_total")},
                    text="Those that moved a checkpoint.",
                ),
            ),
        ),
    ),
)

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
                    queries={"{{instance}}": _rate("tidemark_coordinator_tso_total", "instance")},
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
                    queries={"heartbeats": _rate("tidemark_coordinator_region_heartbeats_total")},
                    text="From stores to the leader.",
                ),
                Panel(
                    title="Safepoint updates",
                    unit="cps",
                    queries={
                        "answered": _rate("tidemark_gcsafepoint_updates_total"),
                        "written": _rate("tidemark_gcsafepoint_transactions_total"),
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
                    queries={"locks": _rate("tidemark_gc_resolved_locks_total")},
                    text="Locks of clients that are gone, below the safepoint.",
                ),
                Panel(
                    title="Versions in the store",
                    unit="cps",
                    queries={"{{tag}}": _rate("tikv_gcworker_gc_keys", "tag", 'cf="write"')},
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
                        "mean": f"{_rate('tidemark_store_group_commands_sum')}"
                        f" / {_rate('tidemark_store_group_commands_count')}"
                    },
                    text="Write commands that share one sync of the disk.",
                ),
                Panel(
                    title="Time of a group",
                    unit="s",
                    queries={
                        "median": _quantile(0.5, "tidemark_store_group_duration_seconds"),
                        "99 %": _quantile(0.99, "tidemark_store_group_duration_seconds"),
                    },
                    text="To decide and to sync it.",
                ),
                Panel(
                    title="Locks",
                    queries={
                        "open": "sum(tidemark_store_open_locks)",
                        "waits a second": _rate("tidemark_store_lock_waits_total"),
                        "deadlocks a second": _rate("tidemark_store_deadlocks_total"),
                    },
                    text="Open: of transactions that are neither committed nor rolled back.",
                ),
                Panel(
                    title="Change feed",
                    unit="cps",
                    queries={
                        "rows": _rate("tidemark_store_feed_rows_total"),
                        "cut, as too slow": _rate("tidemark_store_feed_congested_total"),
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

PUMP: Final = Dashboard(
    name="pump",
    title="Tidemark: pump",
    text="TiDB's binlogs: received, matched, and handed to drainers and changefeeds.",
    rows=(
        Row(
            title="Writing",
            panels=(
                Panel(
                    title="Binlogs",
                    unit="cps",
                    queries={
                        "{{instance}}": _rate("tidemark_pump_written_binlogs_total", "instance"),
                        "{{instance}} refused": _rate(
                            "tidemark_pump_refused_binlogs_total", "instance"
                        ),
                    },
                    text="Refused: TiDB tries another pump; while all refuse it cannot commit.",
                ),
                Panel(
                    title="Bytes",
                    unit="Bps",
                    queries={
                        "{{instance}}": _rate("tidemark_pump_written_bytes_total", "instance"),
                    },
                    text="Payloads acknowledged.",
                ),
                Panel(
                    title="Time of a group",
                    unit="s",
                    queries={
                        "median": _quantile(0.5, "tidemark_pump_write_seconds"),
                        "99 %": _quantile(0.99, "tidemark_pump_write_seconds"),
                    },
                    text="From parsing until it is durable. TiDB's commits wait for it.",
                ),
            ),
        ),
        Row(
            title="Matching",
            panels=(
                Panel(
                    title="Can be pulled up to (age)",
                    unit="s",
                    queries={"{{instance}}": "time() - tidemark_pump_max_commit_timestamp_seconds"},
                    text="It grows while a prewrite has no outcome.",
                ),
                Panel(
                    title="Prewrites without an outcome",
                    queries={"{{instance}}": "tidemark_pump_waiting_prewrites"},
                    text="Their commits, or their rollbacks, have not come yet.",
                ),
                Panel(
                    title="Oldest prewrite without an outcome",
                    unit="s",
                    queries={"{{instance}}": "tidemark_pump_head_of_line_wait_seconds"},
                    text="Everything committed after it waits for it. The pump asks the store.",
                ),
                Panel(
                    title="Commits that came late or alone",
                    queries={
                        "late": "sum(tidemark_pump_late_commits)",
                        "without a prewrite": "sum(tidemark_pump_orphan_commits_total)",
                        "index failures": "sum(tidemark_pump_index_failures)",
                    },
                    text="Since the pumps started. Anything but 0: look in the pump's log.",
                ),
                Panel(
                    title="Index",
                    queries={
                        "{{instance}} is behind": "tidemark_pump_index_behind",
                    },
                    text="1 while the index is caught up from the log.",
                ),
            ),
        ),
        Row(
            title="Reading and disk",
            panels=(
                Panel(
                    title="Binlogs pulled",
                    unit="cps",
                    queries={
                        "{{instance}}": _rate("tidemark_pump_pulled_binlogs_total", "instance"),
                    },
                    text="Counted for each reader.",
                ),
                Panel(
                    title="Readers",
                    queries={"{{instance}}": "tidemark_pump_readers"},
                    text="Open PullBinlogs streams: drainers and changefeeds.",
                ),
                Panel(
                    title="Slowest reader (age)",
                    unit="s",
                    queries={
                        "{{instance}}": "time() - "
                        "(tidemark_pump_slowest_reader_timestamp_seconds > 0)"
                    },
                    text="How old the newest binlog is that every connected reader has. "
                    "No line: nobody reads.",
                ),
                Panel(
                    title="Disk",
                    unit="bytes",
                    queries={
                        "{{instance}} log": "tidemark_pump_value_log_bytes",
                        "{{instance}} free": "tidemark_pump_available_bytes",
                    },
                    text="Below --stop-write-at-available-bytes of free space, binlogs are refused.",
                ),
                Panel(
                    title="GC",
                    unit="cps",
                    queries={"keys": _rate("tidemark_pump_gc_keys_total")},
                    text="Index keys removed, of binlogs that all readers have.",
                ),
                Panel(
                    title="Readers overtaken by GC",
                    queries={"readers": "sum(tidemark_pump_gc_overtaken_readers_total)"},
                    text="They lost binlogs (--gc-force-seconds), and must begin anew.",
                ),
            ),
        ),
    ),
)

SPARK: Final = Dashboard(
    name="spark",
    title="Tidemark: lake jobs",
    text="How Spark applies cuts to the lakes, and how it keeps them in shape.",
    changefeeds=True,
    rows=(
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Lag of the lake",
                    unit="s",
                    queries={"{{changefeed}}": f"tidemark_spark_lag_seconds{{{_CHOSEN}}}"},
                    text="Wall clock minus the newest cut that readers of the lake see.",
                ),
                Panel(
                    title="Lag by stage",
                    unit="s",
                    queries={
                        "{{changefeed}} {{stage}}": f"tidemark_spark_stage_lag_seconds{{{_CHOSEN}}}"
                    },
                    text="captures: from the source to the sink. spark: from the sink to the lake.",
                ),
                Panel(
                    title="Lag as captures see it",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_capture_job_lag_seconds{{{_CHOSEN}}}",
                    },
                    text="It grows, too, when the job is gone.",
                ),
            ),
        ),
        Row(
            title="Cuts",
            panels=(
                Panel(
                    title="Cuts",
                    unit="cps",
                    queries={
                        "{{changefeed}}": _rate(
                            "tidemark_spark_batches_total", "changefeed", _CHOSEN
                        ),
                    },
                    text="Each makes the rows of all tables visible at once.",
                ),
                Panel(
                    title="Row changes",
                    unit="cps",
                    queries={
                        "{{changefeed}}": _rate("tidemark_spark_rows_total", "changefeed", _CHOSEN),
                    },
                    text="Committed to the lake.",
                ),
                Panel(
                    title="Time of a cut",
                    unit="s",
                    queries={
                        "{{changefeed}} median": _quantile(
                            0.5, "tidemark_spark_batch_seconds", "changefeed", _CHOSEN
                        ),
                        "{{changefeed}} 99 %": _quantile(
                            0.99, "tidemark_spark_batch_seconds", "changefeed", _CHOSEN
                        ),
                    },
                    text="To apply it to all tables.",
                ),
                Panel(
                    title="Steps of a batch, mean",
                    unit="s",
                    width=12,
                    queries={
                        "{{step}}": _mean("tidemark_spark_step_seconds", "step", _CHOSEN),
                    },
                    text="latestOffset waits for rows, addBatch is the work, triggerExecution is both.",
                ),
                Panel(
                    title="Inserts that replaced rows",
                    width=12,
                    queries={
                        "{{changefeed}} {{table}}": "increase("
                        f"tidemark_spark_replaced_inserts_total{{{_CHOSEN}}}[$__rate_interval])"
                    },
                    text="Keys that the lake had already. No line: there was none.",
                ),
            ),
        ),
        Row(
            title="Jobs",
            panels=(
                Panel(
                    title="Starts",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_job_starts_total{{{_CHOSEN}}}",
                    },
                    text="Processes started since `spark keep` started.",
                ),
                Panel(
                    title="Errors",
                    queries={
                        "{{changefeed}} {{code}}": f"tidemark_spark_job_errors_total{{{_CHOSEN}}}",
                    },
                    text="By their codes (docs/reference/errors.md). No line: there was none.",
                ),
                Panel(
                    title="Audit is late by",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_audit_late_seconds{{{_CHOSEN}}}",
                    },
                    text="For changefeeds with --audit; 0: it comes round in its time.",
                ),
                Panel(
                    title="Rows audited",
                    unit="cps",
                    queries={
                        "{{changefeed}}": _rate(
                            "tidemark_spark_audit_rows_total", "changefeed", _CHOSEN
                        ),
                    },
                    text="Compared with their source. No line: no changefeed has --audit.",
                ),
                Panel(
                    title="Ranges that differed",
                    queries={
                        "{{changefeed}} {{table}}": "tidemark_spark_audit_differences_total"
                        f"{{{_CHOSEN}}}",
                    },
                    text="`tidemark cli verify --repair` mends them. No line: there was none.",
                ),
            ),
        ),
        Row(
            title="Maintenance",
            panels=(
                Panel(
                    title="Time for which cuts waited, mean",
                    unit="s",
                    queries={
                        "{{changefeed}}": "sum by (changefeed) "
                        f"(tidemark_spark_maintenance_seconds_sum{{{_CHOSEN}}}) / "
                        "sum by (changefeed) "
                        f"(tidemark_spark_maintenance_seconds_count{{{_CHOSEN}}})",
                    },
                    text="While files were compacted and old ones removed (--compact-every).",
                ),
                Panel(
                    title="Small files",
                    unit="percentunit",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_small_file_ratio{{{_CHOSEN}}}",
                    },
                    text="Files below 16 MiB, of the table maintained last.",
                ),
                Panel(
                    title="Deleted rows in files",
                    unit="percentunit",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_deleted_row_ratio{{{_CHOSEN}}}",
                    },
                    text="Rows that readers must leave out, of the table maintained last.",
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, CHANGEFEED, SORTER_AND_SINK, COORDINATOR_AND_GC, PUMP, SPARK)
