"""The page of commands, verbs and flags, made of the parsers; and whether the commands that pages,
alerts and messages name are there.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from docs.generate.source import ROOT
from server.cli.completion import Argument, Command

_HEAD = """# Command line

What `tidemark COMMAND … --help` says. The flags of daemons are their [settings](settings.md), and
are listed there. Exit status: 0 done, 1 an error that was printed with its [code](errors.md),
2 wrong usage.
"""
_ALERTS = "deploy/prometheus/rules.yaml"
_INLINE = re.compile(r"`tidemark ([^`]*)`")
_IN_BLOCK = re.compile(r"^tidemark ([^|;#&\n]*)", re.M)
_IN_ALERT = re.compile(r": tidemark (cli [^\",]*)")
_DAEMON_FLAGS = ("--config", "--log-level", "--log-format")


def page(top: Command) -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *(line for command in top.below for line in _lines(command)), ""])


def _lines(command: Command) -> Iterator[str]:
    level = "##" if len(command.words) == 1 else "###"
    yield f"{level} tidemark {' '.join(command.words)}\n"
    if command.text:
        yield f"{command.text[0].upper()}{command.text[1:]}.\n"
    if _is_daemon(command):
        yield f"Flags: [settings](settings.md#{'-'.join(command.words).replace('spark-run', 'spark')}).\n"
    elif command.arguments:
        yield "| argument | what it says |\n|---|---|"
        yield from (_row(argument) for argument in command.arguments)
        yield ""
    for verb in command.below:
        yield from _lines(verb)


def _is_daemon(command: Command) -> bool:
    flags = {name for argument in command.arguments for name in argument.names}
    return flags.issuperset(_DAEMON_FLAGS)


def _row(argument: Argument) -> str:
    names = ", ".join(argument.names)
    shown = f"{names} {argument.value}".strip().replace("|", "\\|")
    needed = " (required)" if argument.required and argument.names else ""
    text = argument.text.replace("|", "\\|")
    return f"| `{shown}` | {text}{needed} |"


def unknown(top: Command, trees: Iterable[ast.AST]) -> Iterator[str]:
    """The commands that pages, alerts and the modules' messages name, and that there are not."""
    commands = {command.words: command for command in top.walk()}
    for place, text in _named(trees):
        if not fits(text, commands):
            yield f"{place} names `tidemark {text.strip()}`: there is no such verb or flag"


def _named(trees: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    alerts = (ROOT / _ALERTS).read_text(encoding="utf-8")
    yield from ((_ALERTS, text) for text in _IN_ALERT.findall(alerts))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        prose = re.sub("```.*?```", "", text, flags=re.S).replace("\n", " ")
        for found in (*_IN_BLOCK.findall(text), *_INLINE.findall(prose)):
            yield page.name, found
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                message = node.value.replace("\n", " ")
                yield from (("a message", found) for found in _INLINE.findall(message))


def fits(text: str, commands: Mapping[tuple[str, ...], Command]) -> bool:
    """Whether there is a command, with such flags; `text` is what follows `tidemark`. A verb takes
    the flags of the commands above it, too.
    """
    path: tuple[str, ...] = ()
    rest = [word.strip(",.…'\")") for word in text.split()]
    while rest:
        if (*path, rest[0]) in commands:
            path, rest = (*path, rest[0]), rest[1:]
        elif path == ("cli",) and rest[0].startswith("-"):
            rest = rest[2:]  # of every verb: where to connect
        else:
            break
    command = commands[path]
    if command.below:
        return not (rest and re.fullmatch("[a-z][a-z-]+", rest[0]))
    above = [commands[path[:count]] for count in range(1, len(path) + 1)]
    known = {name for one in above for each in one.arguments for name in each.names} | {"--help"}
    return {word.partition("=")[0] for word in rest if word.startswith("--")} <= known
