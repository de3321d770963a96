"""All commands, their verbs and flags, read from the parsers: for what describes the whole command
line, such as its reference. Imports every daemon, which takes seconds.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

from server.cli.cli import cli_parser
from server.cli.config import config_parser, sections
from server.cli.daemon import SPARK_VERBS, daemon_parser, demo_parser
from server.cli.health import health_parser
from server.cli.main import COMMANDS
from server.cli.parser import Parser
from server.cli.play import play_parser

_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag, or a positional argument, whose `names` are empty."""

    names: tuple[str, ...]
    value: str
    """What stands for its value in the usage; empty: it has none."""
    choices: tuple[str, ...]
    text: str
    required: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command or one of its verbs, such as `cli changefeed create`."""

    words: tuple[str, ...]
    text: str
    arguments: tuple[Argument, ...] = ()
    below: tuple["Command", ...] = field(default=())
    """Its verbs, in the order of the help; an alias is none."""

    def walk(self) -> Iterator["Command"]:
        """This one and all below it."""
        yield self
        for command in self.below:
            yield from command.walk()


def completion_parser() -> Parser:
    """The argument of `tidemark completion`."""
    parser = Parser(
        prog="tidemark completion",
        epilog='bash: eval "$(tidemark completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc; '
        "fish: tidemark completion fish > ~/.config/fish/completions/tidemark.fish",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")
    return parser


def tidemark() -> Command:
    """The whole command line."""
    return Command((), "", below=tuple(_command(name, text) for name, text in COMMANDS.items()))


def _command(name: str, text: str) -> Command:
    own = {
        "cli": cli_parser,
        "completion": completion_parser,
        "config": config_parser,
        "demo": demo_parser,
        "health": health_parser,
        "play": play_parser,
    }
    if name in own:
        return _read(own[name](), (name,), text)
    if name != "spark":
        return _read(daemon_parser(name, sections()[name]), (name,), text)
    verbs = [
        _read(daemon_parser(f"spark {verb}", sections()[section]), (name, verb), help_text)
        for verb, (section, help_text) in SPARK_VERBS.items()
    ]
    return Command((name,), text, below=tuple(verbs))


def _read(parser: argparse.ArgumentParser, words: tuple[str, ...], text: str) -> Command:
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]  # noqa: SLF001 - argparse tells it nowhere else
    verbs = [each for each in shown if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001
    return Command(
        words,
        text,
        tuple(_argument(each) for each in shown if each not in verbs and each.dest != "help"),
        tuple(
            _read(verb.choices[choice.dest], (*words, choice.dest), choice.help or "")
            for verb in verbs
            for choice in verb._get_subactions()  # noqa: SLF001
        ),
    )


def _argument(action: argparse.Action) -> Argument:
    choices = tuple(map(str, action.choices or ()))
    value = action.metavar or "|".join(choices) or action.dest.upper().replace("_", "-")
    return Argument(
        tuple(action.option_strings),
        "" if action.nargs == 0 else str(value),
        choices,
        (action.help or "").replace("%%", "%"),
        action.required,
    )
