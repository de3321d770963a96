"""The seeds of whole clusters, in processes of their own: names are walked in the same order in
each.
"""

import pytest

from tests.sim.running import simulate
from tests.sim.whole.plants import PLANTS

SEEDS, PARTS = 40, 4
PLANT_SEEDS = 200


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_cluster_keeps_its_promises_whatever_happens(part):
    count = SEEDS // PARTS
    done = simulate("tests.sim.whole", "--seed", str(1 + part * count), "--seeds", str(count))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_bug_in_the_product_is_found(plant):
    done = simulate("tests.sim.whole", "--seeds", str(PLANT_SEEDS), "--plant", plant)
    assert (done.returncode, "seed " in done.stdout) == (1, True), done.stdout


@pytest.mark.timeout(300)
def test_a_seed_is_one_story():
    once, again = (
        simulate("tests.sim.whole", "--seed", "8", "--seeds", "2").stdout for _ in range(2)
    )
    assert once.partition(" in ")[0] == again.partition(" in ")[0] != ""
