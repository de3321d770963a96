"""Measures Python trees, so that this house can be put beside others:
`python -m tests.house [DIRECTORY…]`.

Prints one line of JSON for each directory; without one, for this product. Tests and generated code
are left out.
"""

import ast
import io
import json
import statistics
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PRODUCT = ("gcsafepoint", "server", "sink", "sorter", "storage")
VAGUE_NAMES = {"it", "found", "told", "held", "asked", "wanted", "known"}
"""Names of variables that do not say what they hold."""
_LEFT_OUT = {"tests", "test", "testing", "gen", "build", ".venv", "node_modules"}
_GENERATED = ("_pb2.py", "_pb2_grpc.py", "conftest.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file: its tree, and its lines by kind."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises: SyntaxError, UnicodeDecodeError: it is no Python of this version."""
        text = path.read_text()
        self.lines = text.count("\n")
        self.tree = ast.parse(text)
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        self.docstrings = list(filter(None, map(_docstring, ast.walk(self.tree))))
        source = text.splitlines()
        documented = {
            line
            for node in self.docstrings
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        self.comments = _full_line_comments(text)
        used = (
            (number, line.strip())
            for number, line in enumerate(source, 1)
            if number not in documented
        )
        self.code = [line for number, line in used if line and number not in self.comments]

    def vague_variables(self) -> int:
        """How many times a variable or parameter gets a vague name."""
        assigned = sum(
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in VAGUE_NAMES
            for node in ast.walk(self.tree)
        )
        return assigned + sum(
            isinstance(node, ast.arg) and node.arg in VAGUE_NAMES for node in ast.walk(self.tree)
        )


def measure(directories: Sequence[Path]) -> dict[str, Any]:
    """The figures of all modules below some directories."""
    modules = list(_modules(directories))
    functions = [function for module in modules for function in module.functions]
    docstrings = [node.value.split() for module in modules for node in module.docstrings]
    code_lines = sum(len(module.code) for module in modules)
    return {
        "files": len(modules),
        "code_lines": code_lines,
        "code_lines_a_file": round(code_lines / len(modules)),
        "file_lines": _spread([module.lines for module in modules]),
        "function_lines": _spread(
            [(one.end_lineno or 0) - one.body[0].lineno + 1 for one in functions]
        ),
        "function_nodes": _spread([sum(1 for _ in ast.walk(one)) for one in functions]),
        "characters_a_code_line": round(
            sum(len(line) for one in modules for line in one.code) / code_lines, 1
        ),
        "comments_per_1000_code_lines": round(
            1000 * sum(len(one.comments) for one in modules) / code_lines, 1
        ),
        "words_a_docstring": round(statistics.mean(map(len, docstrings))) if docstrings else 0,
        "vague_variables": sum(module.vague_variables() for module in modules),
    }


def _modules(directories: Sequence[Path]) -> Iterator[Module]:
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            if _LEFT_OUT.isdisjoint(path.relative_to(directory).parts) and not path.name.endswith(
                _GENERATED
            ):
                module = Module(path)
                if module.code:
                    yield module


def _docstring(node: ast.AST) -> ast.Constant | None:
    documented = ast.Module | ast.ClassDef | Function
    if not isinstance(node, documented) or ast.get_docstring(node, clean=False) is None:
        return None
    first = node.body[0]
    assert isinstance(first, ast.Expr)
    assert isinstance(first.value, ast.Constant)
    return first.value


def _full_line_comments(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#")
    }


def _spread(values: list[int]) -> dict[str, int]:
    """Median, 90th percentile and maximum."""
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "p90": ordered[len(ordered) * 9 // 10],
        "max": ordered[-1],
    }


def main() -> None:
    """Print the figures of the directories of the command line, or of this product."""
    root = Path(__file__).parents[1]
    named = sys.argv[1:]
    groups = {name: [Path(name)] for name in named} or {
        "tidemark": [root / name for name in PRODUCT]
    }
    for name, directories in groups.items():
        print(json.dumps({"tree": Path(name).name, **measure(directories)}))


if __name__ == "__main__":
    main()
