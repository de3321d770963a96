"""Nessie, a real REST catalog of Iceberg, over an S3 server: run by the command in
TIDEMARK_TEST_NESSIE, such as `java -jar nessie-quarkus-0.99.0-runner.jar` (it needs Java 21).
"""

import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports
from tests.s3 import REGION, S3

COMMAND = "TIDEMARK_TEST_NESSIE"
_START_S = 120.0


@contextmanager
def running_nessie(directory: Path, s3: S3) -> Iterator[str]:
    """The URI of its REST catalog, whose warehouse is the bucket of `s3`."""
    port, management = free_ports(2)
    store = "nessie.catalog.service.s3.default-options"
    settings = {
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": port,
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": management,
        "nessie.version.store.type": "IN_MEMORY",
        "nessie.catalog.default-warehouse": "lake",
        "nessie.catalog.warehouses.lake.location": f"s3://{s3.bucket}/warehouse",
        f"{store}.endpoint": s3.endpoint,
        f"{store}.path-style-access": "true",
        f"{store}.region": REGION,
        # clients sign by themselves: pyarrow cannot ask a catalog to do it
        f"{store}.request-signing-enabled": "false",
        f"{store}.access-key": "urn:nessie-secret:quarkus:keys",
        "keys.name": "server",
        "keys.secret": "s3cret",
    }
    flags = [f"-D{name}={value}" for name, value in settings.items()]
    with (directory / "nessie.log").open("wb") as log:
        process = subprocess.Popen(
            shlex.split(os.environ[COMMAND]),
            env=os.environ | {"JAVA_TOOL_OPTIONS": " ".join(["-Xmx512m", *flags])},
            stdout=log,
            stderr=log,
            cwd=directory,
        )
    uri = f"http://127.0.0.1:{port}/iceberg"
    try:
        _wait_ready(f"{uri}/v1/config", process)
        yield uri
    finally:
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up_at:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("Nessie did not start; see nessie.log")
