"""The modules that make up the product, as syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("server", "storage", "sorter", "sink", "gcsafepoint")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Each module with its path in the repository, in order of the paths."""
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_bytes())
