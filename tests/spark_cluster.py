"""A standalone Spark cluster on this machine: a master, and workers of one core each."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.ports import free_port

LIGHT = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
"""Java options of short lives."""


class StandaloneCluster:
    """The master's URL, and the processes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.workers: list[int] = []
        """Process ids of the workers' daemons, whose children are the executors."""


@contextmanager
def running_cluster(directory: Path, workers: int) -> Iterator[StandaloneCluster]:
    """A cluster for the block; its log is `spark.log` in the directory."""
    port = free_port()
    cluster = StandaloneCluster(f"spark://127.0.0.1:{port}")
    with ExitStack() as stack:
        stack.enter_context(_daemon(directory, "master.Master", "--port", str(port)))
        for _ in range(workers):
            arguments = ("-c", "1", "-m", "700m", cluster.url)
            cluster.workers.append(
                stack.enter_context(_daemon(directory, "worker.Worker", *arguments))
            )
        yield cluster


@contextmanager
def _daemon(directory: Path, name: str, *arguments: str) -> Iterator[int]:
    """A daemon of the cluster; its process id."""
    light = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": LIGHT}
    environment = (
        os.environ
        | light
        | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(directory / "work")}
    )
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    command = [
        str(spark_class),
        f"org.apache.spark.deploy.{name}",
        "--host",
        "127.0.0.1",
        "--webui-port",
        "0",
    ]
    with (directory / "spark.log").open("ab") as log:
        process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(200)
