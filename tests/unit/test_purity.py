"""Modules that call themselves pure: no clock, no thread, no file, no network."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_ROOMS = ("server", "sink", "sorter", "storage", "gcsafepoint")
_SAYS_SO = re.compile(r"\bPure\b(?! but)|\(pure\b|, pure;|\bpure state machine\b")
_OUTSIDE = {
    "asyncio",
    "concurrent",
    "grpc",
    "http",
    "os",
    "plyvel",
    "prometheus_client",
    "select",
    "signal",
    "socket",
    "ssl",
    "structlog",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}


def _pure_modules() -> list[Path]:
    texts = {path: path.read_text() for room in _ROOMS for path in (_ROOT / room).rglob("*.py")}
    likely = {path: ast.parse(text) for path, text in texts.items() if _SAYS_SO.search(text)}
    return [
        path for path, module in likely.items() if _SAYS_SO.search(ast.get_docstring(module) or "")
    ]


def _imported(module: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", _pure_modules(), ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_module_that_calls_itself_pure_imports_nothing_of_the_world_outside(path: Path) -> None:
    assert not _imported(ast.parse(path.read_text())) & _OUTSIDE
