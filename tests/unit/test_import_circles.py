"""No module imports itself by way of others, not even for type checking only."""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ROOMS = ("gcsafepoint", "server", "sink", "sorter", "storage")


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {_name(path): path for room in _ROOMS for path in (_ROOT / room).rglob("*.py")}
    graph = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def _name(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts).removeprefix("sink.spark.").removesuffix(".__init__")


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield from [one for one in (name, node.module) if one in modules][:1]
