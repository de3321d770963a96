"""The compositions as text: mounts exist, roots are read-only, each daemon has its probe.

Whether they run, tests/e2e/test_compose.py sees where Docker is.
"""

import re
from pathlib import Path

import pytest
import yaml

from server.cli.health import ROLES

DEPLOY = Path(__file__).parents[3] / "deploy"
SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
DAEMONS = {
    name: service
    for name, service in SERVICES.items()
    if service["image"].removesuffix("-spark") == "${TIDEMARK_IMAGE:-tidemark:local}"
    and name != "chaos"
}


@pytest.mark.parametrize("name", ["compose.yaml", "compose.play.yaml"])
def test_mounted_files_exist(name):
    mounted = re.findall(r'"(\.\.?/[^":]+):', (DEPLOY / name).read_text())
    assert mounted
    assert [path for path in mounted if not (DEPLOY / path).exists()] == []


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"mem_limit", "cpus", "pids_limit", "restart"} <= set(service)
    published = service.get("ports", [])
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("name", DAEMONS)
def test_every_daemon_is_probed_by_its_role(name):
    service = DAEMONS[name]
    command, verb = service["command"][:2]
    role = f"spark-{verb}" if command == "spark" else command
    assert role in ROLES
    assert service["healthcheck"]["test"] == ["CMD", "tidemark", "health", role]


def test_ha_starts_everything_but_the_store_and_the_lake_jobs_more_than_once():
    """Our store keeps one copy of a region; the lake jobs are few, and started again."""
    more = {name.rpartition("-")[0] for name in SERVICES if re.search(r"-\d$", name)}
    assert more == {"etcd", "coordinator", "pump", "gc-worker", "capture"}
    assert all(
        SERVICES[name]["profiles"] == ["ha"] for name in SERVICES if re.search(r"-\d$", name)
    )


def test_chaos_runs_only_when_asked_and_finds_its_code_where_it_is_mounted():
    """Of the mounts of compose.yaml it alone has Docker's socket."""
    chaos = SERVICES["chaos"]
    assert chaos["profiles"] == ["chaos"]
    assert chaos["entrypoint"][-2:] == ["-m", "deploy.chaos"]
    place = f"{chaos['environment']['PYTHONPATH']}/deploy/chaos"
    assert f"./chaos:{place}:ro" in chaos["volumes"]
    with_socket = [
        name for name, each in SERVICES.items() if "docker.sock" in str(each.get("volumes"))
    ]
    assert with_socket == ["chaos"]


def test_everything_that_chaos_may_break_can_say_that_it_is_well_again():
    probed = {name for name, service in SERVICES.items() if "healthcheck" in service}
    assert probed == set(SERVICES) - {"prometheus", "grafana", "chaos"}


@pytest.mark.parametrize(("cluster", "copies"), [("small", ""), ("ha", "-2")])
def test_the_files_of_a_cluster_name_what_it_starts(cluster, copies):
    text = (DEPLOY / f"{cluster}.env").read_text()
    settings = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.M))
    used = set(re.findall(r"\$\{([A-Z_]+)", (DEPLOY / "compose.yaml").read_text()))
    assert set(settings) - {"COMPOSE_PROFILES"} <= used
    scraped = (DEPLOY / "prometheus" / settings["PROMETHEUS_CONFIG"]).read_text()
    names = {
        name
        for name, service in SERVICES.items()
        if name not in ("prometheus", "grafana", "chaos") and ("profiles" not in service or copies)
    }
    assert set(re.findall(r'"([\w-]+):\d+"', scraped)) == names
    for group in ("ETCD", "COORDINATORS"):
        assert set(re.findall(r"([\w-]+):\d+", settings[group])) <= names
