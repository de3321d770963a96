"""Prometheus' own tool reads the rules and plays their test cases;
rules_test.yaml says what is expected when.
"""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=HERE, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_fire_when_they_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yaml")


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-ha.yaml"])
def test_the_configuration_is_valid(name: str) -> None:
    promtool("check", "config", f"../../../deploy/prometheus/{name}")
