"""What the compositions mount is there; whether they run,
tests/e2e/test_compose.py sees where Docker is.
"""

import re
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.play.yaml"])
def test_mounted_files_exist(name):
    mounted = re.findall(r'"(\.\.?/[^":]+):', (DEPLOY / name).read_text())
    assert mounted
    assert [path for path in mounted if not (DEPLOY / path).exists()] == []
