"""The wheels by themselves: built from the sources, installed into a fresh environment,
used from another directory.

The locked packages are lent to that environment by a path, which shows it none of this checkout's
editable installs.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "server",
    "storage",
    "sorter",
    "sink",
    "gcsafepoint",
    "proto",
)
OURS = {"tidemark-cdc", "pyspark-tidemark"}
LISTENERS = ("coordinator", "store", "capture", "flight", "pump", "gc-worker", "http")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    """Both wheels, built without network from a copy:
    setuptools would pack what an older build has left.
    """
    place = tmp_path_factory.mktemp("wheels")
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                source / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"),
            )
        else:
            shutil.copy(ROOT / name, source)
    pip(
        "wheel",
        "--no-build-isolation",
        "--wheel-dir",
        str(place),
        str(source),
        str(source / "sink/spark"),
    )
    return sorted(place.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The programs of an environment that has the wheels."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=300)
    pip("--python", str(place / "bin/python"), "install", *map(str, wheels))
    [packages] = place.glob("lib/*/site-packages")
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib"))
    return place / "bin"


@pytest.fixture(scope="module")
def cluster(installed, tmp_path_factory) -> Iterator[dict[str, str]]:
    """Where a `tidemark up` of the wheels listens."""
    place = tmp_path_factory.mktemp("cluster")
    ports = [part for name in LISTENERS for part in (f"--{name}-addr", "127.0.0.1:0")]
    command = [
        installed / "tidemark",
        "up",
        "--no-spark",
        "--follow-parent",
        "--data-dir",
        place / "data",
        *ports,
    ]
    with (
        (place / "log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=place, env={}
        ) as up,
    ):
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            assert line, (place / "log").read_text()
            yield json.loads(line)["endpoints"]
        finally:
            up.terminate()
            up.wait(60)


def pip(*arguments: str) -> None:
    """Ask pip for something it can do without other packages and without network."""
    offline = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    at = next(number for number, word in enumerate(arguments) if word in ("wheel", "install")) + 1
    command = [sys.executable, "-m", "pip", *arguments[:at], *offline, *arguments[at:]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tidemark(installed: Path, *arguments: str) -> str:
    """What the installed command prints, with an empty environment."""
    command = [installed / "tidemark", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd="/", env={}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(installed: Path) -> str:
    """What the wheel of the daemons asks pip for."""
    script = "import importlib.metadata; print(*importlib.metadata.requires('tidemark-cdc'))"
    return subprocess.check_output([installed / "python", "-c", script], text=True, cwd="/", env={})


def test_the_command_says_its_version_and_is_the_wheels_own(installed):
    assert tidemark(installed, "--version").startswith(
        f"tidemark {importlib.metadata.version('tidemark-cdc')} "
    )
    script = "import server, pyspark_tidemark; print(server.__file__, pyspark_tidemark.__file__)"
    where = subprocess.check_output(
        [installed / "python", "-c", script], text=True, cwd="/", env={}
    )
    assert [Path(each).is_relative_to(installed.parent) for each in where.split()] == [True, True]


def test_the_daemons_of_the_wheels_serve(installed, cluster):
    assert "pyspark-tidemark" in requirements(installed)
    here = ("--server", cluster["capture"], "--pd", cluster["coordinator"], "--json")
    assert json.loads(tidemark(installed, "cli", *here, "changefeed", "list")) == []
    assert json.loads(tidemark(installed, "cli", *here, "tso", "query"))


def test_no_locked_package_has_a_top_level_name_of_ours():
    providers = importlib.metadata.packages_distributions()
    ours = {
        "server",
        "storage",
        "sorter",
        "sink",
        "gcsafepoint",
        "kvproto",
        "etcdpb",
        "tipb",
        "tidemarkpb",
    }
    assert {name: providers[name] for name in ours if set(providers.get(name, ())) - OURS} == {}
