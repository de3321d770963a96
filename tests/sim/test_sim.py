"""The simulation's seeds, in processes of their own: names are walked in the same order in each."""

import os
import subprocess
import sys

import pytest

from tests.sim.plants import PLANTS

SEEDS, PARTS = 1000, 8
PLANT_SEEDS = 150


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim", *flags]
    environment = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((".", "proto/gen", "sink/spark")),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_captures_keep_their_promises_whatever_happens(part):
    count = SEEDS // PARTS
    done = simulate("--seed", str(part * count), "--seeds", str(count))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_bug_in_the_product_is_found(plant):
    done = simulate("--seeds", str(PLANT_SEEDS), "--plant", plant)
    assert (done.returncode, "BrokenError" in done.stdout) == (1, True), done.stdout


@pytest.mark.timeout(120)
def test_a_seed_is_one_story():
    once, again = (simulate("--seed", "7", "--seeds", "3").stdout for _ in range(2))
    assert once.partition(" in ")[0] == again.partition(" in ")[0] != ""
