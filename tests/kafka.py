"""A Kafka broker, the real one, with a process of its own: `python -m tests.kafka` fetches its jars
once, by Spark's own resolver, into the virtual environment.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.ports import free_ports

VERSION = "4.1.1"
USER, PASSWORD = "alice", "s3cret of alice"
_COORDINATES = f"org.apache.kafka:kafka_2.13:{VERSION}"
_CLUSTER_ID = "dGlkZW1hcmstdGVzdHMtMA"
_START_S = 120.0


def jar_directory() -> Path:
    """Where the broker's jars are, once they were fetched."""
    return Path(sys.prefix).resolve() / "share" / "tidemark" / f"kafka-{VERSION}"


def is_installed() -> bool:
    """Whether there is a broker to run."""
    return (jar_directory() / ".complete").is_file()


class Broker:
    """One broker that is its own controller; its data outlive `kill` and `start`."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        """`settings` are added to the usual ones, and override them."""
        self._directory = directory
        self.port, self.sasl_port, self.tls_port, self._controller = free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._properties = directory / "server.properties"
        own = settings or {}
        all_settings = self._settings(has_tls=bool(own.keys() & tls_settings(Path()))) | own
        lines = [f"{name}={value}" for name, value in all_settings.items()]
        self._properties.write_text("\n".join(lines) + "\n")
        self._run_tool("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c")

    @property
    def address(self) -> str:
        """The address of the listener without login."""
        return f"127.0.0.1:{self.port}"

    @property
    def sasl_address(self) -> str:
        """The address of the listener with SASL PLAIN: `USER` and `PASSWORD`."""
        return f"127.0.0.1:{self.sasl_port}"

    @property
    def tls_address(self) -> str:
        """The address of the TLS listener, if the broker has certificates: see `tls_settings`."""
        return f"127.0.0.1:{self.tls_port}"

    def start(self) -> None:
        """Start the process, and wait until it serves."""
        started_at = self._ready_count()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_java(), "kafka.Kafka", str(self._properties)],
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )
        give_up_at = time.monotonic() + _START_S
        while self._ready_count() == started_at:
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"Kafka did not start; see {self._log}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process as a power cut would end it, but for the system's own cache."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def _log(self) -> Path:
        return self._directory / "kafka.log"

    def _ready_count(self) -> int:
        return self._log.read_text().count("Kafka Server started") if self._log.exists() else 0

    def _settings(self, *, has_tls: bool) -> dict[str, str]:
        tls = f"SSL://127.0.0.1:{self.tls_port}," if has_tls else ""
        jaas = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},"
            f"SASL_PLAINTEXT://127.0.0.1:{self.sasl_port},"
            f"{tls}CONTROLLER://127.0.0.1:{self._controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port},{tls}"
            f"SASL_PLAINTEXT://127.0.0.1:{self.sasl_port}",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
                f'{jaas} required user_{USER}="{PASSWORD}";'
            ),
            "log.dirs": str(self._directory / "data"),
            # One broker has one copy of everything.
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            # One that was killed is not waited for.
            "broker.session.timeout.ms": "1000",
            "broker.heartbeat.interval.ms": "200",
        }

    def _run_tool(self, name: str, *arguments: str) -> None:
        with self._log.open("ab") as log:
            subprocess.run(
                [*_java(), name, *arguments, str(self._properties)],
                check=True,
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )


def tls_settings(directory: Path) -> dict[str, str]:
    """The settings of a broker that requires certificates of clients: `server.pem` is its own, with
    the key, `ca.pem` the authority's.
    """
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(directory / "server.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(directory / "ca.pem"),
        "ssl.client.auth": "required",
    }


@contextmanager
def running_broker(directory: Path, settings: dict[str, str] | None = None) -> Iterator[Broker]:
    """A broker for the block."""
    broker = Broker(directory, settings)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def _java() -> list[str]:
    """Java with the broker's jars, and Scala's library from Spark's."""
    spark = Path(pyspark.__file__).parent / "jars"
    scala = next(spark.glob("scala-library-*.jar"))
    logging = [next(spark.glob(f"{name}-*.jar")) for name in ("log4j-slf4j2-impl", "slf4j-api")]
    # Spark's own come first: one binding of SLF4J that fits its API.
    paths = [*logging, *sorted(jar_directory().glob("*.jar")), scala]
    return [
        "java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC",
        f"-Dlog4j2.configurationFile={jar_directory() / 'log4j2.properties'}",
        "-cp", ":".join(map(str, paths)),
    ]  # fmt: skip


def install() -> None:
    """Fetch the jars, unless they are there."""
    if is_installed():
        return
    from pyspark.sql import SparkSession

    directory = jar_directory()
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "spark.jars.packages": _COORDINATES,
        "spark.jars.ivy": str(directory / "ivy"),
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    builder = SparkSession.builder.master("local[1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    builder.getOrCreate().stop()
    for path in sorted((directory / "ivy" / "jars").glob("*.jar")):
        path.rename(directory / path.name)
    (directory / "log4j2.properties").write_text(
        "status = error\nappender.out.type = Console\nappender.out.name = out\n"
        "appender.out.layout.type = PatternLayout\n"
        "appender.out.layout.pattern = %d %p %c %m%n\n"
        "rootLogger.level = info\nrootLogger.appenderRef.out.ref = out\n"
    )
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.jar")]
    (directory / ".complete").write_text(f"{len(digests)} jars\n")


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    install()
