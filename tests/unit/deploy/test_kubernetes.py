"""The Kubernetes overlays, as kustomize renders them: Kubernetes' own schemas know every field,
pods are confined, and what names something else names what is there.

`make kubernetes-check` puts the schemas into build/kubernetes; kustomize or kubectl must be there.
Without them these tests are skipped, but for that of the ports, which reads the manifests as they
are written.
"""

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli.config import sections
from server.cli.daemon import daemon_parser

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
TOOLS = ROOT / "build" / "kubernetes" / "bin"
OVERLAYS = ("small", "ha", "monitored")
RELEASES = ("1.29", "1.33", "1.37")
Object = dict[str, Any]

pytestmark = pytest.mark.timeout(300)


def renderer() -> list[str]:
    if found := shutil.which("kustomize"):
        return [found, "build"]
    if found := shutil.which("kubectl"):
        return [found, "kustomize"]
    pytest.skip("neither kustomize nor kubectl is on the PATH")


@functools.cache
def rendered(overlay: str) -> str:
    command = [*renderer(), str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(overlay: str, *kinds: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(rendered(overlay)) if each["kind"] in kinds]


def workloads(overlay: str) -> list[Object]:
    return objects(overlay, "StatefulSet", "Deployment")


def component(workload: Object) -> str:
    return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def container(workload: Object) -> Object:
    [only] = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def port_names(workload: Object) -> set[str]:
    return {port["name"] for port in container(workload)["ports"]}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_knows_every_field(overlay, release, tmp_path):
    validate = TOOLS / "kubernetes-validate"
    if not validate.exists():
        pytest.skip("no schemas: make kubernetes-check")
    path = tmp_path / f"{overlay}.yaml"
    path.write_text(rendered(overlay))
    command = [str(validate), "--strict", "--quiet", "-k", release, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    complaints = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "monitoring.coreos.com" not in line  # the operator's kinds are not Kubernetes' own
    ]
    assert complaints == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_meet_the_restricted_standard(overlay):
    for workload in workloads(overlay):
        pod = workload["spec"]["template"]["spec"]
        only = container(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert only["readinessProbe"]["httpGet"]["port"] == "http"
        assert "memory" in only["resources"]["requests"]
        assert "memory" in only["resources"]["limits"]
        assert not only["image"].endswith(":latest")
        assert ":" in only["image"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemons_take_their_arguments(overlay):
    settings = sections()
    for workload in workloads(overlay):
        if component(workload) == "etcd":
            continue
        command, *flags = container(workload)["args"]
        if command == "spark":
            command, *flags = f"spark-{flags[0]}", *flags[1:]
        parsed = vars(daemon_parser(command, settings[command]).parse_args(flags))
        assert parsed["coordinator" if command != "coordinator" else "metadata"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_addresses_are_those_of_pods(overlay):
    [addresses] = [
        each
        for each in objects(overlay, "ConfigMap")
        if each["metadata"]["name"].startswith("addresses")
    ]
    replicas = {component(each): each["spec"]["replicas"] for each in workloads(overlay)}
    data = addresses["data"]

    def pods(name: str, port: int) -> str:
        return ",".join(f"{name}-{number}.{name}:{port}" for number in range(replicas[name]))

    assert data["ETCD"] == pods("etcd", 2379)
    assert data["COORDINATORS"] == pods("coordinator", 2379)
    assert data["ETCD_CLUSTER"] == ",".join(
        f"etcd-{number}=http://etcd-{number}.etcd:2380" for number in range(replicas["etcd"])
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_and_ports_find_pods(overlay):
    by_component = {component(each): each for each in workloads(overlay)}
    services = {each["metadata"]["name"]: each for each in objects(overlay, "Service")}
    for service in services.values():
        workload = by_component[service["spec"]["selector"]["app.kubernetes.io/component"]]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= port_names(workload)
    for workload in objects(overlay, "StatefulSet"):
        assert services[workload["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    for budget in objects(overlay, "PodDisruptionBudget"):
        chosen = budget["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        assert by_component[chosen]["spec"]["replicas"] > 1
    all_ports = set().union(*map(port_names, by_component.values()))
    for policy in objects(overlay, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule.get("ports", [])} <= all_ports


def ports_of(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload).get("ports", [])}


def ports_of_flags(workload: Object) -> dict[str, int]:
    flags = (
        re.fullmatch(r"--([\w-]+)=.*:(\d+)", each) for each in container(workload).get("args", [])
    )
    return {flag[1]: int(flag[2]) for flag in flags if flag}


def test_ports_are_those_that_daemons_listen_on():
    """Where a daemon listens, what it calls itself, and what its pod and service name."""
    written = [
        each
        for path in sorted((KUBERNETES / "base").glob("*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
        if "metadata" in each
    ]
    services = {each["metadata"]["name"]: each for each in written if each["kind"] == "Service"}
    workloads = {
        each["metadata"]["name"]: each for each in written if "template" in each.get("spec", {})
    }
    shared = ports_of(workloads.pop("any"))
    of_images = re.findall(r"_HTTP_ADDR=0\.0\.0\.0:(\d+)", (ROOT / "Dockerfile").read_text())
    assert set(map(int, of_images)) == set(shared.values())
    assert workloads.keys() == services.keys()
    for name, workload in workloads.items():
        ports, flags = ports_of(workload), ports_of_flags(workload)
        listening = {
            flag: port
            for flag, port in flags.items()
            if flag in ("addr", "flight-addr") or flag.startswith("listen-")
        }
        assert sorted(listening.values()) == sorted(ports.values())
        for flag, port in listening.items():
            assert flags.get(f"advertise-{flag}", port) == port
        for port in services[name]["spec"]["ports"]:
            assert port["port"] == (shared | ports)[port["targetPort"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_not_contained(overlay):
    assert objects(overlay, "Secret") == []
    volumes = [
        volume["secret"]["secretName"]
        for workload in workloads(overlay)
        for volume in workload["spec"]["template"]["spec"].get("volumes", [])
        if "secret" in volume
    ]
    expected = {"tidemark-tls", "tidemark-flight-token"} if overlay == "monitored" else set()
    assert set(volumes) == expected


def test_etcd_is_reached_by_coordinators_and_itself_only():
    """What any policy of a pod allows is allowed: no other one may select etcd but for metrics."""
    for policy in objects("ha", "NetworkPolicy"):
        name, selector = policy["metadata"]["name"], policy["spec"]["podSelector"]
        excluded = any("etcd" in each["values"] for each in selector.get("matchExpressions", []))
        chosen = selector["matchLabels"].get("app.kubernetes.io/component")
        assert name in ("etcd", "metrics") or excluded or chosen not in (None, "etcd")


def test_the_operators_alerts_are_those_of_the_rules():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    resource = yaml.safe_load((KUBERNETES / "components/monitoring/rules.yaml").read_text())
    assert resource["spec"] == rules


def test_every_service_is_scraped_under_the_name_that_alerts_know():
    [monitor] = objects("monitored", "ServiceMonitor")
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["relabelings"][0]["targetLabel"] == "daemon"
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    for service in objects("monitored", "Service"):
        assert chosen <= service["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert "app.kubernetes.io/component" in service["metadata"]["labels"]


def test_every_dashboard_is_in_the_config_map():
    [dashboards] = [
        each
        for each in objects("monitored", "ConfigMap")
        if each["metadata"]["name"] == "tidemark-dashboards"
    ]
    files = {path.name for path in (ROOT / "deploy/grafana/dashboards").iterdir()}
    assert set(dashboards["data"]) == files
