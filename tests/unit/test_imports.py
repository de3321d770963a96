"""Imports: no modules import each other in a circle, and a module that calls itself pure reaches no
clock, thread, file or network, neither itself nor by what it imports.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
_VALUES_FROM = {
    "pyspark_tidemark.connection": "Flight's actions and their errors",
    "pyspark_tidemark.lake.target": "the record of a data file",
    "pyspark_tidemark.uri_secrets": "the words for secrets; a password is in the environment",
    "server.capture.creation": "the tables that a changefeed would have",
    "server.coordinator.errors": "gRPC's status codes, in the errors of PD's protocol",
    "server.dump.job": "the job of a dump",
    "server.puller.mysql.session.connection": "a session's type, which checks are given",
    "server.puller.open_transactions": "the format of what is spilled",
    "sink.holds": "where cuts may not end, behind a lock",
    "sink.table_sink": "the positions of one table, behind a lock",
    "sink.versions": "the versions of tables, behind a lock",
    "sorter": "the extent of a range's rows",
    "storage.defect": "the error of a request that met a defect, which is logged",
    "storage.mvcc.read_fence": "the greatest timestamp that was read, behind a lock",
}
"""Modules that do meet the world outside, and of which pure ones use only values. Not to grow."""


class _Imports(NamedTuple):
    ours: frozenset[str]
    outside: frozenset[str]


def _name(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts).removeprefix("sink.spark.").removesuffix(".__init__")


@cache
def _modules() -> dict[str, ast.Module]:
    paths = (path for room in _ROOMS for path in (_ROOT / room).rglob("*.py"))
    return {_name(path): ast.parse(path.read_text()) for path in paths}


def _pure_modules() -> list[str]:
    return [
        name
        for name, module in _modules().items()
        if _SAYS_SO.search(ast.get_docstring(module) or "")
    ]


def _import_statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield those of functions and branches, too."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _import_statements(getattr(statement, block, []))


@cache
def _imports(name: str) -> _Imports:
    modules, imported = _modules(), set[str]()
    for statement in _import_statements(modules[name].body):
        if isinstance(statement, ast.Import):
            imported.update(alias.name for alias in statement.names)
        elif statement.module is not None:
            for member in (f"{statement.module}.{alias.name}" for alias in statement.names):
                imported.add(member if member in modules else statement.module)
    ours = imported & modules.keys()
    others = {each.partition(".")[0] for each in imported - ours}
    return _Imports(frozenset(ours), frozenset(others & _OUTSIDE))


def _ways_outside(name: str) -> Iterator[str]:
    """Yield each way by imports to a module that meets the world outside; the ways end at modules
    of which only values are used.
    """
    ways = {name: name}
    waiting = [name]
    while waiting:
        module = waiting.pop(0)
        imports = _imports(module)
        if imports.outside:
            yield f"{ways[module]} -> {', '.join(sorted(imports.outside))}"
        for each in sorted(imports.ours - ways.keys() - _VALUES_FROM.keys()):
            ways[each] = f"{ways[module]} -> {each}"
            waiting.append(each)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even for type checking only."""
    graph = {name: _imports(name).ours - {name} for name in _modules()}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("name", _pure_modules())
def test_a_module_that_calls_itself_pure_reaches_nothing_of_the_world_outside(name: str) -> None:
    assert not list(_ways_outside(name))


def test_each_exception_is_used_and_is_none_without_reason() -> None:
    """An exception that no pure module imports any more, or that has become pure, goes."""
    reached, waiting = set[str](), _pure_modules()
    while waiting:
        ours = _imports(waiting.pop()).ours - reached
        reached |= ours
        waiting.extend(ours - _VALUES_FROM.keys())
    assert reached & _VALUES_FROM.keys() == _VALUES_FROM.keys()
    others = _VALUES_FROM.keys()
    assert [name for name in others if not list(_ways_outside(name))] == []
