"""deploy/chaos against a real Docker: small containers are killed, stopped and paused, and are well
at the end. The whole cluster under it is in test_compose.py.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter

import pytest

from tests.e2e.test_compose import ROOT, checked, docker, run, wait_for

__all__ = ["docker"]  # a fixture
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
PROJECT, IMAGE = f"tidemark-chaos-test-{os.getpid()}", "tidemark-busybox:test"
SERVICES = ["one", "two"]


@pytest.fixture
def containers(docker):
    """Two of a project, which know whether they are well, and one that does not."""
    if (busybox := shutil.which("busybox")) is None:
        pytest.skip("no busybox: apt-get install busybox-static")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(busybox, "bin/busybox")
        tar.add(busybox, "bin/sh")  # which runs the health check
    subprocess.run(
        ["docker", "import", "-", IMAGE],
        input=archive.getvalue(),
        env={**os.environ, **docker},
        check=True,
        capture_output=True,
    )
    for name in [*SERVICES, "blind"]:
        probe = ("--health-cmd", "/bin/busybox true", "--health-interval", "1s")
        checked(
            *("docker", "run", "-d", "--init", "--name", f"{PROJECT}-{name}"),
            *("--label", f"com.docker.compose.project={PROJECT}"),
            *("--label", f"com.docker.compose.service={name}"),
            *("--label", "com.docker.compose.oneoff=False"),
            *(probe if name in SERVICES else ()),
            *(IMAGE, "/bin/busybox", "sleep", "9999"),
            **docker,
        )
    yield docker
    run("docker", "rm", "-f", *(f"{PROJECT}-{name}" for name in [*SERVICES, "blind"]), **docker)


def command(docker, *flags):
    host = {**os.environ, **docker}.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    socket = host.removeprefix("unix://")
    module = [sys.executable, "-m", "deploy.chaos", "--project", PROJECT, "--socket", socket]
    return [*module, *flags]


def state(docker, name):
    what = "{{.State.Status}} {{.State.Health.Status}}"
    return checked("docker", "inspect", "-f", what, f"{PROJECT}-{name}", **docker).strip()


def test_containers_are_broken_by_the_seed_and_well_at_the_end(containers):
    checked("docker", "pause", f"{PROJECT}-two", **containers)  # as a run that was killed left it
    done = run(*command(containers, "--seed", "3", "--minutes", "0.7", "--every", "0.5"))
    assert done.returncode == 0, done.stderr
    first, *lines, last = map(json.loads, done.stdout.splitlines())
    assert first["services"] == SERVICES
    faults = [line for line in lines if "fault" in line]
    assert Counter(line["healthy"] for line in lines if "healthy" in line) == Counter(
        line["service"] for line in faults
    )
    assert last == {"finished": True, "faults": len(faults)}
    assert len(faults) >= 2
    assert [state(containers, name) for name in SERVICES] == ["running healthy"] * 2


def test_a_run_that_is_stopped_mends_what_it_had_broken(containers):
    flags = ("--kinds", "pause", "--every", "0.1", "--services", "one")
    with subprocess.Popen(
        command(containers, *flags), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as chaos:
        assert chaos.stdout is not None
        while "fault" not in json.loads(chaos.stdout.readline()):
            pass
        wait_for(lambda: state(containers, "one").startswith("paused"), 30, "the pause")
        chaos.send_signal(signal.SIGTERM)
        assert json.loads(chaos.stdout.read().splitlines()[-1])["finished"] is True
    assert chaos.returncode == 0
    assert state(containers, "one").startswith("running")


def test_a_service_that_is_not_there_is_told_by_name(containers):
    done = run(*command(containers, "--services", "one,three,blind"))
    assert done.returncode == 1
    assert "no container with a health check for blind, three" in done.stderr
