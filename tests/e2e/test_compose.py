"""The whole way as containers: real etcd, every daemon by itself, Prometheus sees all of them,
the demo's rows arrive, also while a coordinator and a capture are killed.

Needs a Docker daemon, or root and `dockerd`, then a private one is started. Where no image registry
can be reached the base image is made with debootstrap. TIDEMARK_DOCKER=0 skips.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "tidemark-test"
IMAGE = "tidemark:test"
SMALL = {
    "coordinator": 1,
    "store": 1,
    "capture": 1,
    "pump": 1,
    "gc-worker": 1,
    "spark": 1,
    "etcd": 1,
}
"""How many of each daemon Prometheus must see."""
HA = SMALL | {"coordinator": 3, "capture": 2, "pump": 2, "gc-worker": 2, "etcd": 3}
KILLED = {
    *("etcd", "etcd-2", "etcd-3", "coordinator", "coordinator-2", "coordinator-3", "store"),
    *("capture", "capture-2", "pump", "pump-2", "gc-worker", "gc-worker-2", "spark"),
}
"""Every container with a health check."""
PROMETHEUS = "http://127.0.0.1:9090/api/v1"
MAX_DAEMON_IMAGE_BYTES = 400_000_000

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
    # as the slim images of registries are made
    for part in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt/archives"):
        shutil.rmtree(root / part)
    shutil.rmtree(root / "var/lib/apt/lists")
    checked("sh", "-c", f"tar -C {root} -c . | docker import - {name}", **environment)
    shutil.rmtree(root)
    return name


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(1)  # containers on a busy machine: nothing to wait on but their state


class Composition:
    """deploy/compose.yaml as `make up CLUSTER=…` starts it."""

    def __init__(self, environment: dict[str, str], cluster: str) -> None:
        self.environment = environment
        modern = run("docker", "compose", "version", **environment).returncode == 0
        if not modern and shutil.which("docker-compose") is None:
            pytest.skip("docker has no `compose`, and there is no docker-compose")
        self._command = (
            *(("docker", "compose") if modern else ("docker-compose",)),
            *("-p", PROJECT, "-f", "deploy/compose.yaml", "--env-file", f"deploy/{cluster}.env"),
            *(("--profile", "ha") if cluster == "ha" else ()),
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*self._command, *arguments, **self.environment)

    @contextmanager
    def started(self, daemons: dict[str, int]) -> Iterator[None]:
        """Up for the block, from when Prometheus sees so many of each daemon."""
        try:
            up = self("up", "-d")
            assert up.returncode == 0, up.stderr
            wait_for(lambda: scraped() == daemons, 300, f"a scrape of {daemons}")
            yield
        finally:
            self("down", "-v", "--remove-orphans")

    def demo(self, *flags: str) -> tuple[str, ...]:
        """The command that runs the bank in the Spark image and compares the lake."""
        return (
            *(*self._command, "run", "--rm", "--no-deps", "-T", "spark", "demo"),
            *("--join", "coordinator:2379", "--capture", "captures:8300", "--lake-dir", "/lake"),
            *("--data-dir", "/data/demo", "--accounts", "50", "--tellers", "4", "--seed", "5"),
            *("--killed-clients", "1", *flags),
        )

    def is_healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def inspect(self, service: str, what: str) -> str:
        container = self("ps", "-q", service).stdout.strip()
        return checked("docker", "inspect", "-f", what, container, **self.environment).strip()


def asked(query: str) -> list[dict[str, Any]]:
    """What Prometheus answers; nothing while it starts."""
    url = f"{PROMETHEUS}/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def scraped() -> dict[str, int]:
    """How many of each daemon answer."""
    return {
        each["metric"]["daemon"]: int(each["value"][1])
        for each in asked("count by (daemon) (up == 1)")
    }


def service_where(metric: str) -> str:
    """The service of the one container whose metric is 1."""
    [series] = asked(f"{metric} == 1")
    return str(series["metric"]["instance"]).partition(":")[0]


def test_the_daemon_image_is_small_and_its_processes_may_write_to_volumes_only(images):
    size = int(checked("docker", "image", "inspect", "-f", "{{.Size}}", IMAGE, **images))
    assert size <= MAX_DAEMON_IMAGE_BYTES
    flags = ("--rm", "--read-only", "--tmpfs", "/tmp", "--entrypoint", "sh", IMAGE, "-c")
    said = checked(
        *("docker", "run", *flags),
        "id -u; touch /data/x /tmp/x && touch ~/x 2>&1; command -v java pip || true",
        **images,
    )
    user, refused, *programs = said.splitlines()
    assert user == "10001"
    assert "Read-only file system" in refused
    assert programs == []


def test_rows_reach_the_lake_and_prometheus_sees_every_daemon(images):
    composition = Composition(images, "small")
    with composition.started(SMALL):
        done = run(*composition.demo("--transactions", "60", "--rate", "0"), **images)
        assert done.returncode == 0, (
            done.stdout + done.stderr + composition("logs", "--tail", "40").stdout
        )
        assert "lake = store       EQUAL" in done.stdout


def test_the_lake_is_equal_after_the_leader_and_the_owner_were_killed(images, tmp_path):
    """kill -9 of the coordinator that leads, and of the capture that owns the changefeeds."""
    composition = Composition(images, "ha")
    log = tmp_path / "demo.log"
    with composition.started(HA), log.open("wb") as output:
        command = composition.demo("--transactions", "400", "--rate", "10")
        environment = {**os.environ, **images}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as demo:
            wait_for(lambda: transfers(log) >= 50, 300, "fifty transfers")
            victims = [
                service_where("tidemark_coordinator_leader"),
                service_where("tidemark_capture_is_owner"),
            ]
            for victim in victims:
                # all but process 1, which is tini: it ends with the status of its child
                composition("exec", "-T", victim, "sh", "-c", "kill -9 -1")
            status = demo.wait(900)
        logs = composition("logs", "--tail", "40").stdout
        assert status == 0, log.read_text() + logs
        assert "lake = store       EQUAL" in log.read_text()
        restarts = {victim: composition.inspect(victim, "{{.RestartCount}}") for victim in victims}
        assert restarts == dict.fromkeys(victims, "1")
        wait_for(lambda: scraped() == HA, 120, "a scrape of every daemon, killed ones too")
        for victim in victims:
            wait_for(partial(composition.is_healthy, victim), 120, f"a healthy {victim}")


def test_the_lake_is_equal_after_each_container_was_killed(images):
    """The profile `chaos` kills every container once, while the demo writes."""
    host = {**os.environ, **images}.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    chaos = {
        "CHAOS_SEED": "7",
        "CHAOS_MINUTES": "30",
        "CHAOS_ROUNDS": "1",
        "CHAOS_KINDS": "kill",
        "CHAOS_EVERY": "3",
        "DOCKER_SOCKET": host.removeprefix("unix://"),
    }
    composition = Composition({**images, **chaos}, "ha")
    with composition.started(HA):
        up = composition("--profile", "chaos", "up", "-d", "--no-deps", "chaos")
        assert up.returncode == 0, up.stderr
        done = run(*composition.demo("--transactions", "2600", "--rate", "10"), **images)
        logs = composition("--profile", "chaos", "logs", "--no-color", "chaos").stdout
        assert done.returncode == 0, done.stdout + done.stderr + logs
        assert "lake = store       EQUAL" in done.stdout
        killed = set(re.findall(r'"fault": "kill", "service": "([^"]+)"', logs))
        assert killed == KILLED, logs


def transfers(log: Path) -> int:
    """How many the demo has made, as its last line of progress says."""
    counts = re.findall(r"transactions (\d+)/", log.read_text())
    return int(counts[-1]) if counts else 0
