"""promtool, as operators run it, finds nothing to complain of in what the daemons show."""

import ast
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from docs.generate.metrics import Metric, metrics
from server.demo.bank import ACCOUNTS
from tests.house import PRODUCT
from tests.integration.capture.processes import Daemon, running_cluster

ALERTED = {
    "coordinator": ("pd_gc_gc_safepoint", "tidemark_gcsafepoint_timestamp_seconds"),
    "capture": (
        "ticdc_owner_checkpoint_ts",
        "ticdc_owner_checkpoint_ts_lag",
        "ticdc_owner_resolved_ts",
        "ticdc_owner_resolved_ts_lag",
        "ticdc_owner_status",
    ),
    "pump": (
        "binlog_pump_storage_gc_ts",
        "binlog_pump_storage_max_commit_ts",
        "binlog_pump_storage_storage_size_bytes",
    ),
    "store": ("tikv_gcworker_autogc_safe_point", "tidemark_store_resolved_timestamp_seconds"),
    "gc-worker": ("tidb_tikvclient_gc_worker_actions_total",),
}
"""Names of which each daemon must show a sample: alerts and dashboards ask for them."""

UNTYPED = {"tikv_gcworker_gc_keys", "tikv_gcworker_gc_tasks_vec", "tikv_gcworker_gc_task_fail_vec"}
"""TiKV's counters, whose names do not end in _total."""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed"),
]


def scrape(daemon: Daemon) -> str:
    with urllib.request.urlopen(f"http://{daemon.endpoints['http']}/metrics", timeout=60) as answer:
        return answer.read().decode()


def made_by_the_code() -> list[Metric]:
    """All metrics, those of daemons that are not started here and of labels without a value too."""
    root = Path(__file__).parents[2]
    modules = [
        (path.relative_to(root), ast.parse(path.read_text()))
        for name in PRODUCT
        for path in sorted((root / name).rglob("*.py"))
    ]
    return [metric for path, tree in modules for metric in metrics(path, tree)]


def complaints(text: str) -> list[str]:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert bool(done.returncode) == bool(lines)
    return lines


def test_promtool_accepts_every_daemon_and_alerts_find_their_names(tmp_path):
    with running_cluster(tmp_path) as cluster:
        pump = cluster.start(
            "pump", "--coordinator", cluster.pd, "--data-dir", str(tmp_path / "pump")
        )
        gc_worker = cluster.start("gc-worker", "--coordinator", cluster.pd)
        cluster.api(
            "CreateChangefeed",
            pb.CreateChangefeedRequest(
                id="bank",
                sink_uri="delta:///lake",
                tables=[pb.Table(schema_name="bank", table_info_json=ACCOUNTS.to_json())],
            ),
        )
        shown = {
            daemon.name: scrape(daemon)
            for daemon in (cluster.coordinator, cluster.store, cluster.capture, pump, gc_worker)
        }
    assert {name: complaints(text) for name, text in shown.items()} == {name: [] for name in shown}
    samples = {
        name: {line.partition(" ")[0].partition("{")[0] for line in text.splitlines()}
        for name, text in shown.items()
    }
    missing = {name: set(names) - samples[name] for name, names in ALERTED.items()}
    assert missing == {name: set() for name in ALERTED}


def test_promtool_accepts_every_name_in_the_code():
    made = {metric.name: metric for metric in made_by_the_code()}
    assert "tidemark_spark_cut_ts" in made
    lines = []
    for name, metric in sorted(made.items()):
        kind = "untyped" if name in UNTYPED else metric.kind
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {kind}"]
        if kind == "histogram":
            lines += [f'{name}_bucket{{le="+Inf"}} 1', f"{name}_sum 1", f"{name}_count 1"]
        else:
            lines.append(f"{name} 1")
    assert complaints("\n".join(lines) + "\n") == []
