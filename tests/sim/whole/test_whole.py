"""The seeds of whole clusters, in processes of their own: names are walked in the same order in
each.
"""

import os
import subprocess
import sys

import pytest

from tests.sim.whole.plants import PLANTS

SEEDS, PARTS = 40, 4
PLANT_SEEDS = 200


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.whole", *flags]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((".", "proto/gen", "sink/spark")),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_cluster_keeps_its_promises_whatever_happens(part):
    count = SEEDS // PARTS
    done = simulate("--seed", str(1 + part * count), "--seeds", str(count))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_bug_in_the_product_is_found(plant):
    done = simulate("--seeds", str(PLANT_SEEDS), "--plant", plant)
    assert (done.returncode, "seed " in done.stdout) == (1, True), done.stdout


@pytest.mark.timeout(300)
def test_a_seed_is_one_story():
    once, again = (simulate("--seed", "7", "--seeds", "2").stdout for _ in range(2))
    assert once.partition(" in ")[0] == again.partition(" in ")[0] != ""
