"""The whole way, in small: the demo must end with the proof that the lake equals the store."""

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--any-ports", "--accounts", "60", "--tellers", "4", "--seed", "20261121", "--rate", "0")


def demo(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "server.cli.main",
        "demo",
        "--data-dir",
        str(data),
        *SMALL,
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def logs(data: Path) -> str:
    return "\n".join(
        f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((data / "logs").glob("*.log"))
    )


@pytest.mark.timeout(1900)
def test_the_delta_lake_equals_the_store_after_killed_clients_and_a_second_run(tmp_path):
    first = demo(tmp_path, "--transactions", "150", "--killed-clients", "2")
    assert first.returncode == 0, first.stdout + first.stderr + logs(tmp_path)
    assert "lake = store       EQUAL" in first.stdout
    second = demo(tmp_path, "--transactions", "30", "--killed-clients", "0", "--client", "own")
    assert second.returncode == 0, second.stdout + second.stderr + logs(tmp_path)
    assert "lake = store       EQUAL" in second.stdout


@pytest.mark.timeout(1900)
def test_the_parquet_changelog_replays_to_the_store(tmp_path):
    done = demo(tmp_path, "--transactions", "80", "--killed-clients", "1", "--lake", "parquet")
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    assert "lake = store       EQUAL" in done.stdout


@pytest.mark.timeout(1000)
def test_the_proof_holds_after_kill_9_of_the_whole_cluster_under_load(tmp_path):
    done = demo(tmp_path, "--transactions", "300", "--killed-clients", "1", "--kills", "2")
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    assert "lake = store       EQUAL" in done.stdout
