"""The kill matrix in small: each target equals the store after kill -9 of its driver and of what is
beside it.
"""

import json
import subprocess
import sys

import pytest

from tests.kafka import is_installed


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("target", "seed"),
    [
        ("delta", 1),
        ("iceberg", 2),
        pytest.param("parquet", 3, marks=pytest.mark.nightly),
        pytest.param("postgresql", 4, marks=pytest.mark.nightly),
        ("kafka", 5),
    ],
)
def test_a_lake_equals_the_store_after_kills(target, seed):
    if target == "kafka" and not is_installed():
        pytest.skip("there is no Kafka broker; `make kafka` fetches it")
    command = [
        sys.executable,
        "-m",
        "tests.e2e.kill_matrix",
        "--target",
        target,
        "--kills",
        "2",
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[:3000] + "\n…\n" + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["duplicated"], found["equal"]) == (0, 0, True)
    assert found["kills"] >= 2
    assert found["rows"] > 60
