"""The page of error codes, made of `docs/reference/errors.toml`,
which has to have exactly the codes that the code has.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator

from docs.generate.source import ROOT
from server.cli.completion import Command

CATALOGUE = "docs/reference/errors.toml"
_CODE = re.compile(r"Err[A-Z][A-Za-z0-9]+")
_IN_TEXT = re.compile(r"\[TM:(Err[A-Z][A-Za-z0-9]+)\]")
_COMMAND = re.compile(r"`tidemark((?: [a-z][a-z-]*(?=[ `]))+)")
_FLAG = re.compile(r"--[a-z][a-z-]+")
_NO_CODES = {"ErrMsg", "ErrName"}
"""A member of Pump's status document, and what docstrings write for any code."""
_OTHER_FLAGS = {"--no-class-archive"}
"""Of `python -m pyspark_tidemark.jars`."""
_HEAD = """# Error codes

Every error of Tidemark begins with its code, as in
`[TM:ErrTargetBusy] another job writes to /lake; stop it first`. The message says what has happened
to what; this page says what the code means, and what you can do. Codes of databases, PD, etcd and
Spark stand in messages as they came. `errors.toml` beside this page has the same for programs.
"""


class CatalogueError(Exception):
    """The catalogue and the code have different codes, or an entry lacks a part."""


def codes(trees: Iterable[ast.AST]) -> set[str]:
    """All codes that stand in the modules, as strings of their own or in the text of an error."""
    named = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                named |= {text} if _CODE.fullmatch(text) else set(_IN_TEXT.findall(text))
    return named - _NO_CODES


def page(trees: Iterable[ast.AST], top: Command) -> str:
    """The page as Markdown.

    Raises:
        CatalogueError: the catalogue does not have exactly the codes of the modules, or names a
            command or flag that there is not.
    """
    catalogue = tomllib.loads((ROOT / CATALOGUE).read_text(encoding="utf-8"))
    faults = [*_faults(catalogue, codes(trees)), *_unknown_commands(catalogue, top)]
    if faults:
        raise CatalogueError("\n".join(faults))
    lines = [
        f"| `{code}` | {entry['meaning']} | {entry['workaround']} |"
        for code, entry in catalogue.items()
    ]
    return "\n".join([_HEAD, "| code | meaning | what to do |\n|---|---|---|", *lines, ""])


def _faults(catalogue: dict[str, dict[str, str]], used: set[str]) -> Iterator[str]:
    for code in sorted(used - catalogue.keys()):
        yield f"{CATALOGUE} has no {code}: add what it means, and what to do"
    for code in sorted(catalogue.keys() - used):
        yield f"{CATALOGUE} has {code}, which no module has: take it out"
    if list(catalogue) != sorted(catalogue):
        yield f"{CATALOGUE} is not in the order of its codes"
    for code, entry in catalogue.items():
        if entry.keys() != {"meaning", "workaround"} or not all(entry.values()):
            yield f"{CATALOGUE}: {code} has to have a meaning and a workaround, and nothing else"


def _unknown_commands(catalogue: dict[str, dict[str, str]], top: Command) -> Iterator[str]:
    commands = {" ".join(command.words) for command in top.walk()}
    flags = {
        name for command in top.walk() for argument in command.arguments for name in argument.names
    }
    for code, entry in catalogue.items():
        text = entry["workaround"]
        for words in _COMMAND.findall(text):
            if words.strip() not in commands:
                yield f"{CATALOGUE}: {code} names `tidemark {words.strip()}`, which there is not"
        for flag in _FLAG.findall(text):
            if flag not in flags | _OTHER_FLAGS:
                yield f"{CATALOGUE}: {code} names {flag}, which no command has"
