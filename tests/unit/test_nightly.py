import re
from pathlib import Path

from tests.conftest import nightly_tests

TESTS = Path(__file__).parents[1]


def _is_there(test: str) -> bool:
    path, _, case = test.partition("::")
    function, _, _ = case.partition("[")
    return bool(re.search(rf"^(async )?def {function}\(", (TESTS / path).read_text(), re.MULTILINE))


def test_what_is_left_to_the_night_is_there() -> None:
    assert [test for test in sorted(nightly_tests()) if not _is_there(test)] == []
