"""Dumps of a cluster's tables through churn, DDL, pauses, new starts and kill -9,
in an order that a seed gives.

Among the DDL is a MODIFY that changes every value, as TiDB carries it out while rows change.

At each cut of each run every row that the reader has is the source's row of that timestamp; in the
end it has all.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tidemarkpb.v1 import dump_pb2 as pb
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.dump.cluster_source import ClusterSource
from tests.integration.dump.cluster_target import ClusterTarget, MergedTarget
from tests.integration.tidb.pumps import FLAGS

FEED = "shop"
STEPS = ("kill", "pause", "restart", "truncate", "drop", "add column", "create", "rename")


def asked(cluster: Cluster, method: str, **fields: Any) -> Any:
    """A call of the dump's service; as the capture may just be starting, again and again."""
    request = {
        "StartDump": pb.StartDumpRequest,
        "PauseDump": pb.PauseDumpRequest,
        "ResumeDump": pb.ResumeDumpRequest,
    }
    request |= {"RestartDump": pb.RestartDumpRequest, "GetDumpStatus": pb.GetDumpStatusRequest}
    with grpc.insecure_channel(cluster.capture.endpoints["capture"]) as channel:
        call = getattr(DumpServiceStub(channel), method)
        return call(request[method](changefeed_id=FEED, **fields), timeout=60, wait_for_ready=True)


def is_over(cluster: Cluster) -> bool:
    return bool(asked(cluster, "GetDumpStatus").dump.state == "finished")


def rows_read(cluster: Cluster) -> int:
    return int(asked(cluster, "GetDumpStatus").dump.rows_read)


def far_enough(cluster: Cluster, rows: int) -> Callable[[], bool]:
    """When so many rows were read, or none is for long: of a DDL, some are lost that were read."""
    until = time.monotonic() + 5
    return lambda: is_over(cluster) or rows_read(cluster) >= rows or time.monotonic() > until


def step(kind: str, cluster: Cluster, source: ClusterSource, chance: random.Random) -> None:
    """Do one thing to a dump under way."""
    match kind:
        case "kill":
            cluster.capture.kill()
            cluster.capture.start()
        case "pause":
            assert asked(cluster, "PauseDump").dump.state in {"paused", "finished"}
            asked(cluster, "ResumeDump")
        case "restart":
            asked(cluster, "RestartDump")
        case "truncate":
            source.truncate(chance.choice(source.names("plain", "parts", "big", "huge")))
        case "drop":
            source.drop("side")
        case "add column":
            source.add_column(chance.choice(source.names("plain", "parts", "big", "huge")))
        case "modify" | "modify and more":
            several = kind == "modify and more"
            source.modify(
                chance.choice(source.names("plain", "parts", "big", "huge")), several=several
            )
        case "create":
            source.create("new", 300)
        case "rename":
            source.rename("big", "huge")


def follow_dump(
    cluster: Cluster,
    source: ClusterSource,
    source_uri: str,
    seed: int,
    kind_of_target: type[ClusterTarget],
) -> ClusterTarget:
    """One run."""
    chance, merges = random.Random(seed), kind_of_target is MergedTarget
    source.create("plain", 700)
    source.create("big", 4500)
    source.create("parts", 600, partitions=3)
    source.create("side", 200)
    uri = ["--source-uri", source_uri] if source_uri else []
    uri += ["--route", MergedTarget.ROUTE] if merges else []
    made = cluster.cli(
        *(
            "changefeed",
            "create",
            "-c",
            FEED,
            "--sink-uri",
            "parquet:///lake",
            "--no-confirm",
            "--filter",
            "shop.*",
        ),
        *uri,
    )
    assert isinstance(made, dict), made
    target = kind_of_target(cluster, source, FEED, int(made["start_ts"]))
    source.churn()
    asked(
        cluster,
        "StartDump",
        rows_per_second_max=chance.choice([1500, 3000]),
        parallel=chance.choice([1, 4]),
    )
    steps = [*chance.sample(STEPS, 3), "modify", *(() if source_uri else ("modify and more",))]
    chance.shuffle(steps)
    for kind in steps:
        target.follow(far_enough(cluster, rows_read(cluster) + chance.randrange(1, 900)))
        step(kind, cluster, source, chance)
    target.follow(lambda: is_over(cluster))
    source.stop()
    now = cluster.now()
    target.follow(lambda: target.at >= now)
    target.check()
    assert set(target.missing(now).values()) == {0}, (steps, target.missing(now))
    if merges:
        # Rows of shards that were dropped or renamed have gone.
        assert {*target.rows} <= {f"shop.{name}" for name in source.tables}
    return target


def run(
    directory: Path,
    seed: int,
    source_uri: str = "",
    kind_of_target: type[ClusterTarget] = ClusterTarget,
) -> ClusterTarget:
    """A run with a cluster of its own; what the reader has in the end,
    which was compared at each cut.
    """
    flags = ["--workers", str(1 + seed % 2)]
    with running_cluster(directory, *flags) as cluster:
        pump = None
        if source_uri:
            data = ["--coordinator", cluster.pd, "--data-dir", str(directory / "pump")]
            pump = cluster.start("pump", *data, *FLAGS, "--fake-binlog-seconds", "0.2")
        source = ClusterSource(cluster.pd, pump.endpoints["pump"] if pump else "", seed).opened()
        try:
            return follow_dump(cluster, source, source_uri, seed, kind_of_target)
        finally:
            if source.is_alive():
                source.stop()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seed", "source_uri", "kind"),
    [(1, "", ClusterTarget), (2, "", MergedTarget), (3, "pump://", ClusterTarget)],
)
def test_the_reader_has_the_sources_rows_at_each_cut_and_all_of_them_in_the_end(
    tmp_path: Path, seed: int, source_uri: str, kind: type[ClusterTarget]
) -> None:
    assert any(run(tmp_path, seed, source_uri, kind).rows.values())
