"""Random lives of tables, from the server through a capture to a lake;
longer by `python -m tests.fuzz.mysql.whole`.

The seeds are the same each time, as CI tells of a change and not of luck; TIDEMARK_TEST_EXPLORE=1
looks for others.
"""

import itertools
import os
import random

import pytest

from tests.fuzz.mysql.whole import lives, world

FIRST_SEED = 731905422
LIVES = 3
STEPS = 120


@pytest.mark.timeout(900)
def test_random_lives_end_equal_to_select_or_stop_by_name() -> None:
    seed = random.randrange(1 << 31) if os.environ.get("TIDEMARK_TEST_EXPLORE") else FIRST_SEED
    print(f"first seed {seed}")
    with world() as of_lives:
        told = lives(of_lives, itertools.islice(itertools.count(seed), LIVES), length=STEPS)
    print(told)
    assert told["equal"], "at least one of them is compared"
