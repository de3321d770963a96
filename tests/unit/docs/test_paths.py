"""Pages name modules that are there."""

import re
from pathlib import Path

import pytest

from tests.walk.blocks import ROOT, pages

_PATH = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)`")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_that_a_page_names_is_there(page: Path) -> None:
    rooms = ("server", "storage", "sorter", "sink", "gcsafepoint", "deploy", "docs", "tests")
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in (ROOT / room).rglob("*.py")]
    named = set(_PATH.findall(page.read_text(encoding="utf-8")))
    gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert not gone
