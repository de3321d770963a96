"""The systemd units: systemd finds no fault in them, they are confined, daemons take their file."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server.cli import health, main

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"
ROLES = ("coordinator", "store", "capture", "pump", "gc-worker")
MAX_EXPOSURE = 2.0
"""What `systemd-analyze security` calls OK ends at 4.9; a service without any limit has 9.6."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units with the `tidemark` of this environment, by the names that they are started by."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "tidemark"
    command.symlink_to(Path(sys.prefix) / "bin" / "tidemark")
    made = []
    for path in UNITS.iterdir():
        if path.suffix == ".toml":
            continue
        text = path.read_text().replace("/opt/tidemark/bin/tidemark", str(command))
        text = re.sub(r"^(User|Group)=.*$", r"\1=root", text, flags=re.M)  # there is no tidemark
        copy = tmp_path / path.name
        copy.write_text(text)
        names = [f"tidemark@{role}.service" for role in ROLES] if "@" in path.name else [path.name]
        made += [tmp_path / name for name in names]
    return made


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@needs_systemd
def test_systemd_finds_no_fault(units):
    done = analyze("verify", "--man=no", *map(str, units))
    ours = [line for line in done.stderr.splitlines() if "tidemark" in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
@pytest.mark.parametrize("name", ["tidemark@.service", "tidemark-spark.service"])
def test_services_are_confined(name):
    done = analyze("security", "--offline=true", "--no-pager", str(UNITS / name))
    exposure = re.search(r"exposure level.*?: ([\d.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout


def test_the_file_is_one_that_daemons_take(capsys):
    assert main.main(["config", "check", str(UNITS / "tidemark.toml")]) == 0
    sections = capsys.readouterr().out
    assert all(role in sections for role in (*ROLES, "spark-keep"))


def test_health_finds_each_daemon_by_the_file(monkeypatch):
    asked = []

    def ready(address, _timeout_s):
        asked.append(address)
        return 200, ""

    # Not over the network: somebody's daemon may listen there.
    monkeypatch.setattr(health, "_readyz", ready)
    file = UNITS / "tidemark.toml"
    roles = (*ROLES, "spark-keep")
    for role in roles:
        assert main.main(["health", role, "--config", str(file)]) == 0
    sections = tomllib.loads(file.read_text())
    assert asked == [sections[role]["http-addr"] for role in roles]
