"""A few random tables' lives, the tracker against a real server;
longer by `python -m tests.fuzz.mysql.ddl`.

The seeds are the same each time, as CI tells of a change and not of luck; TIDEMARK_TEST_EXPLORE=1
looks for others.
"""

import os
import random

import pytest

from tests.fuzz.mysql.ddl import lives
from tests.mariadb import MariaDb

FIRST_SEED = 949195613
TABLES = 50


@pytest.mark.timeout(300)
def test_what_the_tracker_says_of_random_ddl_is_what_the_server_has(mariadb: MariaDb) -> None:
    seed = random.randrange(1 << 31) if os.environ.get("TIDEMARK_TEST_EXPLORE") else FIRST_SEED
    print(f"first seed {seed}")
    told = lives(mariadb, first=seed, tables=TABLES)
    print(told)
    assert told["understood"] > told["unclear"], (
        "most statements are followed without reading rows again"
    )
