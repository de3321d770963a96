"""The whole way as containers: real etcd, every daemon by itself, Prometheus sees all of them,
the demo's rows arrive.

Needs a Docker daemon, or root and `dockerd`, then a private one is started. Where no image registry
can be reached the base image is made with debootstrap. TIDEMARK_DOCKER=0 skips.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "tidemark-test"
IMAGE = "tidemark:test"
DAEMONS = {"coordinator", "store", "capture", "pump", "gc-worker", "spark"}

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3000)]


def run(
    *command: str, timeout: float = 1800, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def checked(*command: str, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def docker() -> Iterator[dict[str, str]]:
    """The environment in which `docker` reaches a daemon."""
    if os.environ.get("TIDEMARK_DOCKER") == "0" or shutil.which("docker") is None:
        pytest.skip("no docker command, or TIDEMARK_DOCKER=0")
    if run("docker", "info", timeout=30).returncode == 0:
        yield {}
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("no Docker daemon, and none can be started here")
    with tempfile.TemporaryDirectory(
        prefix="tidemark-dockerd-", ignore_cleanup_errors=True
    ) as place:
        yield from private_daemon(Path(place))


def private_daemon(place: Path) -> Iterator[dict[str, str]]:
    socket = f"unix://{place}/docker.sock"
    flags = (
        "--data-root",
        f"{place}/data",
        "--exec-root",
        f"{place}/exec",
        "--pidfile",
        f"{place}/pid",
        "--host",
        socket,
    )
    with (
        (place / "log").open("wb") as log,
        subprocess.Popen(["dockerd", *flags], stdout=log, stderr=log) as daemon,
    ):
        try:
            wait_for(
                lambda: run("docker", "info", timeout=30, DOCKER_HOST=socket).returncode == 0,
                60,
                "dockerd",
            )
            yield {"DOCKER_HOST": socket}
        finally:
            daemon.terminate()
            daemon.wait(60)
            run(
                "umount", "--lazy", f"{place}/exec/netns/default"
            )  # dockerd leaves its network namespace mounted


@pytest.fixture(scope="module")
def images(docker) -> dict[str, str]:
    """The images of the composition, built from a base that this machine can get."""
    environment = {**docker, "DOCKER_BUILDKIT": "0", "TIDEMARK_IMAGE": IMAGE}
    base = os.environ.get("BASE_IMAGE") or local_base(environment)
    extra = sorted(Path("/usr/local/share/ca-certificates").glob("*.crt"))
    copies = [Path(shutil.copy(certificate, ROOT / "deploy" / "ca")) for certificate in extra]
    try:
        checked("make", "images", f"IMAGE={IMAGE}", f"BASE_IMAGE={base}", **environment)
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)
    return environment


def local_base(environment: dict[str, str]) -> str:
    name = "tidemark-base:local"
    if run("docker", "image", "inspect", name, **environment).returncode == 0:
        return name
    if shutil.which("debootstrap") is None:
        pytest.skip("no BASE_IMAGE given and no debootstrap to make one")
    root = Path(checked("mktemp", "-d").strip())
    checked(
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates,python3,python3-venv",
        "bookworm",
        str(root),
    )
    checked("sh", "-c", f"tar -C {root} -c . | docker import - {name}", **environment)
    shutil.rmtree(root)
    return name


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(1)  # containers on a busy machine: nothing to wait on but their state


def compose(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    modern = run("docker", "compose", "version", **environment).returncode == 0
    command = ("docker", "compose") if modern else ("docker-compose",)
    return run(*command, "-p", PROJECT, "-f", "deploy/compose.yaml", *arguments, **environment)


def targets() -> dict[str, str]:
    with urllib.request.urlopen("http://127.0.0.1:9090/api/v1/targets", timeout=5) as answer:
        active = json.load(answer)["data"]["activeTargets"]
    return {
        target["labels"].get("daemon", target["labels"]["job"]): target["health"]
        for target in active
    }


def scraped() -> bool:
    try:
        found = targets()
    except OSError:
        return False
    return all(found.get(name) == "up" for name in (*DAEMONS, "etcd"))


def test_rows_reach_the_lake_and_prometheus_sees_every_daemon(images):
    up = compose(images, "up", "-d")
    assert up.returncode == 0, up.stderr
    try:
        wait_for(scraped, 180, "a scrape of every daemon")
        done = compose(
            images,
            *(
                "run",
                "--rm",
                "--no-deps",
                "-T",
                "spark",
                "demo",
                "--join",
                "coordinator:2379",
                "--capture",
                "capture:8300",
            ),
            *(
                "--lake-dir",
                "/lake",
                "--data-dir",
                "/data/demo",
                "--transactions",
                "60",
                "--accounts",
                "50",
            ),
            *("--tellers", "4", "--killed-clients", "1", "--seed", "5", "--rate", "0"),
        )
        assert done.returncode == 0, (
            done.stdout + done.stderr + compose(images, "logs", "--tail", "40").stdout
        )
        assert "lake = store       EQUAL" in done.stdout
    finally:
        compose(images, "down", "-v")
