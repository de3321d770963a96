"""The simulation's seeds, in processes of their own: names are walked in the same order in each."""

import pytest

from tests.sim.plants import PLANTS
from tests.sim.running import simulate

SEEDS, PARTS = 1000, 8
PLANT_SEEDS = 200
PLANT_FIRST = {"unheld": 101}
"""One cluster in a hundred shows it: its first is the 52nd or the 173rd, as the product changes."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_captures_keep_their_promises_whatever_happens(part):
    count = SEEDS // PARTS
    done = simulate("tests.sim", "--seed", str(part * count), "--seeds", str(count))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_bug_in_the_product_is_found(plant):
    first = str(PLANT_FIRST.get(plant, 1))
    done = simulate("tests.sim", "--seed", first, "--seeds", str(PLANT_SEEDS), "--plant", plant)
    assert (done.returncode, "BrokenError" in done.stdout) == (1, True), done.stdout


@pytest.mark.timeout(120)
def test_a_seed_is_one_story():
    once, again = (simulate("tests.sim", "--seed", "7", "--seeds", "3").stdout for _ in range(2))
    assert once.partition(" in ")[0] == again.partition(" in ")[0] != ""
