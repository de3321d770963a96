"""Pages name modules that are there, and the guide functions that are."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.walk.blocks import ROOT, pages

_PATH = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)`")
_WORDS = {"gc_worker", "gc_state_revision", "pyspark_tidemark"}
"""What the guide's walks name beside functions and classes."""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_that_a_page_names_is_there(page: Path) -> None:
    rooms = ("server", "storage", "sorter", "sink", "gcsafepoint", "deploy", "docs", "tests")
    files = [f"/{path.relative_to(ROOT)}" for room in rooms for path in (ROOT / room).rglob("*.py")]
    named = set(_PATH.findall(page.read_text(encoding="utf-8")))
    gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert not gone


def test_a_method_or_function_that_the_guide_names_is_there() -> None:
    guide = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    walks = guide[guide.index("The same way by function names") : guide.index("## Where to add")]
    members, functions = _definitions()
    methods = re.findall(r"`(_?[A-Z]\w+)\.(\w+)`", guide)
    assert len(methods) > 30
    assert not [f"{name}.{member}" for name, member in methods if member not in members[name]]
    words = set(re.findall(r"`([a-z]\w*_\w+|(?!Err)[A-Z]\w+[a-z]\w+)`", walks))
    assert len(words) > 10
    assert sorted(words - functions - members.keys() - _WORDS) == []


def _definitions() -> tuple[dict[str, set[str]], set[str]]:
    """The members of each class, those of all classes of one name together, and all functions."""
    members: defaultdict[str, set[str]] = defaultdict(set)
    functions, name = set[str](), ""
    definition = re.compile(r"^(class|( *)(?:async )?def|(    )(?=\w+: ))\s*(\w+)", re.MULTILINE)
    for room in ("server", "storage", "sorter", "sink", "gcsafepoint"):
        for path in (ROOT / room).rglob("*.py"):
            for kind, indent, field, defined in definition.findall(path.read_text("utf-8")):
                if kind == "class":
                    name = defined
                    members[name]  # a class without members is known, too
                elif indent or field:
                    members[name].add(defined)
                else:
                    functions.add(defined)
    return members, functions
