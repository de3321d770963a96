"""Every query of Grafana's dashboards has an answer from a real Prometheus, which scraped a real
`tidemark up` with a busy bank, a MariaDB that is followed, and TiDB's binlogs.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvproto import pdpb_pb2 as pdpb
from kvproto.pdpb_pb2_grpc import PDStub
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from deploy.grafana.panels import DASHBOARDS
from storage.model.ts import compose
from tests.dashboards import ROOT, with_variables
from tests.mariadb import running_mariadb
from tests.ports import free_port

COMMAND = [sys.executable, "-m", "server.cli.main"]
LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")
QUIET = {
    ("overview", "Clients refused"): "nobody is refused",
    ("overview", "Changes of certificates"): "the daemons have none",
    ("changefeed", "Errors"): "no changefeed met an error",
    ("changefeed", "Region faults and locks in the way"): "no subscription ended",
    ("spark", "Errors"): "no job met an error",
    ("spark", "Inserts that replaced rows"): "the lake had no rows of others",
    ("spark", "Rows audited"): "no changefeed has --audit",
    ("spark", "Ranges that differed"): "no changefeed has --audit",
}
"""Panels that may stay empty in a cluster in which all is well."""
PATIENCE_S = 420

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


@dataclass(frozen=True)
class Query:
    """One query of one panel."""

    dashboard: str
    panel: str
    legend: str
    text: str


def all_queries() -> list[Query]:
    return [
        Query(dashboard.name, panel.title, legend, text)
        for dashboard in DASHBOARDS
        for row in dashboard.rows
        for panel in row.panels
        for legend, text in panel.queries.items()
    ]


@contextmanager
def process(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **environment}
        )
    try:
        yield started
    finally:
        started.terminate()
        started.communicate(timeout=120)


@contextmanager
def tree(directory: Path) -> Iterator[dict[str, Any]]:
    """`tidemark up`: its ready line. Lakes are maintained after every second cut."""
    flags = [part for name in LISTENERS for part in (f"--{name}-addr", "127.0.0.1:0")]
    command = [*COMMAND, "up", "--data-dir", str(directory / "data"), *flags]
    log = directory / "up.log"
    with process(log, *command, TIDEMARK_SPARK_KEEP_COMPACT_EVERY="2") as started:
        line = started.stdout.readline()
        assert line, log.read_text()
        yield json.loads(line)


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes it every second, with the rules that deploy/ has."""
    address = f"127.0.0.1:{free_port()}"
    scrape = {"job_name": "tidemark", "static_configs": [{"targets": [target]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "deploy/prometheus/rules.yaml")],
        "scrape_configs": [scrape],
    }
    path = directory / "prometheus.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    flags = (
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={address}",
    )
    with process(directory / "prometheus.log", "prometheus", *flags):
        yield address


def answer(address: str, query: str) -> list[dict[str, Any]]:
    """The series with a number; none while Prometheus starts."""
    parameters = urllib.parse.urlencode({"query": with_variables(query)})
    url = f"http://{address}/api/v1/query?{parameters}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            series = json.load(response)["data"]["result"]
    except urllib.error.HTTPError as err:
        with err:
            if err.code != 503:
                pytest.fail(f"{query}: {err.read().decode()}")
        return []
    except OSError:
        return []
    return [each for each in series if not isnan(float(each["value"][1]))]


def labels_missing(legend: str, series: list[dict[str, Any]]) -> set[str]:
    """Labels of the legend that the series do not have: they would be shown as nothing."""
    named = set(re.findall(r"{{(\w+)}}", legend))
    return {label for label in named if not all(label in each["metric"] for each in series)}


class Binlogs:
    """TiDB, as far as a pump sees it, and one reader."""

    def __init__(self, ready: dict[str, Any]) -> None:
        endpoints = ready["endpoints"]
        self._cluster_id = ready["cluster_id"]
        self._channels = [
            grpc.insecure_channel(endpoints[name]) for name in ("pump", "coordinator")
        ]
        self._pump = pump_pb2_grpc.PumpStub(self._channels[0])
        self._pd = PDStub(self._channels[1])
        self._reader = self._pump.PullBinlogs(
            pump_pb2.PullBinlogReq(
                clusterID=self._cluster_id, startFrom=pump_pb2.Pos(offset=self._now())
            )
        )

    def write_one(self) -> None:
        """A prewrite and its commit, which the reader then has."""
        start_ts = self._now()
        self._write(tp=0, start_ts=start_ts, prewrite_value=b"row")
        self._write(tp=1, start_ts=start_ts, commit_ts=self._now())
        next(self._reader)

    def close(self) -> None:
        self._reader.cancel()
        for channel in self._channels:
            channel.close()

    def _write(self, **members: Any) -> None:
        payload = binlog_pb2.Binlog(**members).SerializeToString()
        request = pump_pb2.WriteBinlogReq(clusterID=self._cluster_id, payload=payload)
        self._pump.WriteBinlog(request, timeout=60)

    def _now(self) -> int:
        header = pdpb.RequestHeader(cluster_id=self._cluster_id)
        [stamp] = self._pd.Tso(iter([pdpb.TsoRequest(header=header, count=1)]))
        return compose(stamp.timestamp.physical, stamp.timestamp.logical)


def follow_mariadb(ready: dict[str, Any], server: Any) -> None:
    """A changefeed of a MariaDB that keeps its log for ten days."""
    server.execute("CREATE DATABASE shop")
    server.execute("CREATE TABLE shop.t (id INT PRIMARY KEY)")
    create = ("changefeed", "create", "-c", "shop", "--filter", "shop.*")
    uris = ("--source-uri", server.uri, "--sink-uri", "flight://")
    address = ready["endpoints"]["capture"]
    subprocess.run([*COMMAND, "cli", "--server", address, *create, *uris], check=True, timeout=120)


def bank(ready: dict[str, Any], directory: Path) -> list[str]:
    endpoints = ready["endpoints"]
    places = ("--lake-dir", str(directory / "lake"), "--data-dir", str(directory / "demo"))
    joined = ("--join", endpoints["coordinator"], "--capture", endpoints["capture"])
    size = ("--transactions", "300", "--accounts", "50", "--rate", "4", "--killed-clients", "1")
    return [*COMMAND, "demo", *joined, *places, *size, "--tellers", "4", "--seed", "5"]


def test_every_query_has_an_answer(tmp_path):
    open_queries = all_queries()
    nameless: dict[Query, set[str]] = {}
    with (
        tree(tmp_path) as ready,
        running_mariadb("--binlog-expire-logs-seconds=864000") as server,
        prometheus(tmp_path, ready["endpoints"]["http"]) as address,
        closing(Binlogs(ready)) as binlogs,
        process(tmp_path / "demo.log", *bank(ready, tmp_path)),
    ):
        follow_mariadb(ready, server)
        deadline = time.monotonic() + PATIENCE_S
        for number in itertools.count():
            if time.monotonic() > deadline:
                break
            # As long as the test looks: the bank may end before Prometheus had an answer.
            server.execute(f"INSERT INTO shop.t VALUES ({number})")
            binlogs.write_one()
            for query in list(open_queries):
                if series := answer(address, query.text):
                    open_queries.remove(query)
                    if missing := labels_missing(query.legend, series):
                        nameless[query] = missing
            if all((query.dashboard, query.panel) in QUIET for query in open_queries):
                break
            time.sleep(1)
    assert nameless == {}
    assert [each for each in open_queries if (each.dashboard, each.panel) not in QUIET] == []
