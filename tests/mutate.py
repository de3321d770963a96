"""Mutation testing by hand: `python -m tests.mutate MODULE [--tests PATH …]`.

Changes one thing of a module at a time (a comparison, a number, a condition, a statement that is
left out), and runs the tests that judge the module. A mutant that all of them pass is a survivor:
either no test states what the changed place is for, or the change makes no difference. One line is
printed for each survivor (file:line, function, before -> after), and at last one line of JSON.
Status 1 means that there are survivors that nothing explains.

No file is changed. Each mutant is a fork of this process in which an importer hands out the changed
source, so a run can be stopped at any time. Processes that a test starts see the unchanged source;
tests that start them judge nothing here. `tests/mutate.toml` says which tests judge a core module,
and explains the survivors that are equivalent to the original.

Why not a library: mutmut leaves out decorated functions and class bodies. cosmic-ray writes into
the tree, starts an interpreter for each mutant, and mutates annotations.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from hypothesis import Phase, settings

TREE = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
_OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_LOGS = {"log", "_log", "logger", "_logger"}
_TEXT_METHODS = {"__repr__", "__str__"}
_SKIPPED = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)

_NOT_LOADED = 99
_MEMORY_BYTES_MAX = 4 << 30


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change. `name` has no line number: other lines may come and go."""

    line: int
    name: str
    source: str


class Outcome(Enum):
    """What the tests said."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed_out"


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module's source, from its first line to its last.

    Docstrings, messages, logs, assertions, annotations and decorators are left as they are.
    """
    lines = source.splitlines(keepends=True)
    for where, node, replacement in _sites(ast.parse(source), ""):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        # Columns of syntax trees count bytes.
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        before = "".join(lines[first : last + 1])[len(head) :].removesuffix(tail)

        after = ast.unparse(replacement)
        text = f"({after})" if isinstance(replacement, ast.expr) else after
        kept_lines = "\n" * before.count("\n") if text == "pass" else ""
        mutated = "".join(lines[:first]) + head + text + kept_lines + tail
        name = f"{where or 'module'}: {' '.join(before.split())} -> {after}"
        yield Mutant(node.lineno, name, mutated + "".join(lines[last + 1 :]))


Site = tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]


def _sites(node: ast.AST, where: str) -> Iterator[Site]:
    """What can be replaced in a node and below it, and by what; `where` is the function's name."""
    if isinstance(node, _SKIPPED) or _is_log(node) or getattr(node, "name", "") in _TEXT_METHODS:
        return
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        where = f"{where}.{node.name}".removeprefix(".")
    if isinstance(node, ast.expr):
        yield from ((where, node, mutated) for mutated in _expressions(node))
    if isinstance(node, ast.stmt):
        yield from ((where, *change) for change in _statements(node))

    # The arguments of an exception are its message.
    children = [] if isinstance(node, ast.Raise) else _children(node)
    for child in children:
        constant = _constant(child) if isinstance(node, ast.Module | ast.ClassDef) else ""
        yield from _sites(child, f"{where}.{constant}".strip("."))


def _constant(node: ast.AST) -> str:
    """The name that a statement of a module or class gives a value."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "bases"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                mutated = copy.deepcopy(node)
                mutated.ops[place] = _COMPARISONS[type(operator)]
                yield mutated
        case ast.BoolOp(values=values):
            for place in range(len(values)):
                rest = values[:place] + values[place + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.BinOp(left=left, right=right) if type(node.op) in _OPERATORS:
            if not (_is_text(left) or _is_text(right) or _is_type_union(node)):
                yield ast.BinOp(left, _OPERATORS[type(node.op)], right)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            function = ast.Name(_FUNCTIONS[name], ast.Load())
            keywords = [] if name == "sorted" else node.keywords
            yield ast.Call(function, node.args, keywords)
        case ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), node.body, node.orelse)


def _statements(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    match node:
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case (
            ast.Expr() | ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break()
        ):
            yield node, ast.Pass()
        case ast.Return(value=None):
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()
        case ast.If(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield test, ast.UnaryOp(ast.Not(), test)


def _is_log(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGS
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name)))):
            return name in _LOGS
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_type_union(node: ast.BinOp) -> bool:
    """Whether it is `A | B` or `A | None`: a type alias, or the second argument of isinstance."""
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return isinstance(node.op, ast.BitOr) and any(
        name.id in {"int", "str", "bytes"}
        or (name.id.lstrip("_")[:1].isupper() and not name.id.isupper())
        for name in names
    )


class _Importer(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Hands out one module with another source."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        super().__init__(module, str(path))
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Unshrunk:
    """A failing example is enough; which is the smallest is not asked."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings(), phases=phases, database=None)
        settings.load_profile("mutants")


class Judge:
    """Runs the tests of one module against other sources of it."""

    def __init__(self, path: Path, tests: Sequence[str], scratch: Path) -> None:
        """`path` is relative to the tree; `scratch` is a directory for what the tests write."""
        self._path = TREE / path
        self._module = ".".join(path.with_suffix("").parts).removeprefix("sink.spark.")
        self._tests = tests
        self._scratch = scratch
        self._log = scratch / "log"
        self._timeout_s = 600.0

    def warm_up(self, source: str) -> None:
        """Run the tests with the source as it is, and load the libraries that they load.

        Raises: SystemExit: they fail, or do not import the module.
        """
        listing = self._scratch / "libraries"
        began = time.monotonic()
        status = self._status(source, listing)
        if status == _NOT_LOADED:
            raise SystemExit(f"these tests do not import {self._module}: name others by --tests")
        if status != 0:
            raise SystemExit(self._log.read_text() + "\nthe tests fail without a change")
        self._timeout_s = max(30.0, 8 * (time.monotonic() - began))

        for name in listing.read_text().split():
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # a submodule that only its package can load

    def outcome(self, mutant: Mutant) -> Outcome:
        """What the tests say of a mutant."""
        status = self._status(mutant.source)
        if status is None:
            return Outcome.TIMED_OUT
        return Outcome.KILLED if status else Outcome.SURVIVED

    def _status(self, source: str, listing: Path | None = None) -> int | None:
        """The exit status of the tests, in a fork with a session of its own; None: it hung."""
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                self._run(source, listing)
            finally:
                traceback.print_exc()  # pytest itself failed
                os._exit(1)

        deadline = time.monotonic() + self._timeout_s
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what tests left behind
        if ended:
            return os.waitstatus_to_exitcode(status)
        os.waitpid(child, 0)
        return None

    def _run(self, source: str, listing: Path | None) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))
        sys.meta_path.insert(0, _Importer(self._module, self._path, source))

        plugins = ("cacheprovider", "randomly", "xdist")
        off = [argument for plugin in plugins for argument in ("-p", f"no:{plugin}")]
        off += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries are loaded before
        basetemp = f"--basetemp={self._scratch / 'tests'}"
        status = pytest.main(["-x", "-q", *off, basetemp, *self._tests], plugins=[_Unshrunk()])
        if status == 0 and self._module not in sys.modules:
            status = _NOT_LOADED
        if listing is not None:
            listing.write_text("\n".join(filter(_is_library, list(sys.modules))))
        sys.stdout.flush()
        os._exit(int(status))


def _is_library(name: str) -> bool:
    """Whether a module is none of the product's or the tests': a mutant does not change it."""
    origin = getattr(sys.modules[name], "__file__", None)
    if origin is None or name == "__main__":
        return False
    path = Path(origin)
    ours = path.is_relative_to(TREE) and not path.is_relative_to(Path(sys.prefix))
    return not ours


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("module", help="its path, as sink/quota.py")
    parser.add_argument("--tests", nargs="+", help="other tests than those of tests/mutate.toml")
    parser.add_argument("--only", default="", help="only mutants whose line of output has this")
    arguments = parser.parse_args()

    os.chdir(TREE)
    entry = tomllib.loads(TABLE.read_text()).get(arguments.module, {})
    tests = arguments.tests or entry.get("tests")
    if not tests:
        parser.error(f"{arguments.module} is not in tests/mutate.toml: name its tests by --tests")
    equivalent = entry.get("equivalent", {})

    source = Path(arguments.module).read_text()
    counts = {"mutants": 0, **{outcome.value: 0 for outcome in Outcome}, "explained": 0}
    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        judge = Judge(Path(arguments.module), tests, Path(scratch))
        judge.warm_up(source)
        for mutant in mutants(source):
            if arguments.only not in mutant.name:
                continue
            outcome = judge.outcome(mutant)
            counts["mutants"] += 1
            counts[outcome.value] += 1
            if outcome is Outcome.SURVIVED and mutant.name in equivalent:
                counts["explained"] += 1
            elif outcome is Outcome.SURVIVED:
                print(f"{arguments.module}:{mutant.line} {mutant.name}", flush=True)

    print(json.dumps({"module": arguments.module, **counts}))
    sys.exit(counts["survived"] > counts["explained"])


if __name__ == "__main__":
    main()
