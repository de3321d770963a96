"""The whole command line as data, and `tidemark completion bash|zsh|fish`: a script by which the
shell completes commands, verbs, flags and their choices.

`tidemark` reads all commands from their parsers, also for the reference in docs; it imports every
daemon, which takes seconds. So the script has all words in it, and no key press waits for Python.
We keep argparse rather than click or typer: their completion starts the program at each key press,
and the whole command line here takes seconds to import, while one group takes a tenth of one.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from shlex import quote

from server.cli.arguments import Parser
from server.cli.cli import cli_parser
from server.cli.config import config_parser, sections
from server.cli.daemon import SPARK_VERBS, daemon_parser, demo_parser, play_parser
from server.cli.health import health_parser
from server.cli.main import COMMANDS
from server.exit_status import EXIT_OK

_BASH = """_tidemark() {{
    local word at="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        case "$at $word" in
            {paths}) at="$at $word" ;;
        esac
    done
    case "$at" in
{words}
    esac
    case "$at ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tidemark tidemark
"""
_ZSH = "autoload -Uz compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"
_FISH = """function __tidemark_at
    set -l at
    for word in (commandline -opc)[2..]
        contains -- "$at $word" {paths}; and set at "$at $word"
    end
    test "$at" = "$argv[1]"
end
"""
_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag, or a positional argument, whose `names` are empty."""

    names: tuple[str, ...]
    value: str
    """The placeholder of its value in the usage; empty: it takes no value."""
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
        # As `--help` prints it: %(default)s is the default, and %% is %.
        (action.help or "") % vars(action),
        action.required,
    )


def completion_parser() -> Parser:
    """The argument of `tidemark completion`."""
    parser = Parser(
        prog="tidemark completion",
        epilog='bash: eval "$(tidemark completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc; '
        "fish: tidemark completion fish > ~/.config/fish/completions/tidemark.fish",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    arguments = completion_parser().parse_args(list(argv))
    print(_SCRIPTS[arguments.shell](tidemark()), end="")
    return EXIT_OK


def bash(top: Command) -> str:
    """The script for bash."""
    commands = list(top.walk())
    return _BASH.format(
        paths=" | ".join(quote(_path(command)) for command in commands if command.words),
        words="\n".join(
            f"        {quote(_path(command))}) words={quote(' '.join(_words(command)))} ;;"
            for command in commands
        ),
        choices="\n".join(
            f"        {quote(f'{_path(command)} {name}')}) words={quote(' '.join(argument.choices))} ;;"
            for command in commands
            for argument in command.arguments
            for name in argument.names
            if argument.choices
        ),
    )


def zsh(top: Command) -> str:
    """The script for zsh, which can read bash's."""
    return _ZSH + bash(top)


def fish(top: Command) -> str:
    """The script for fish, which also shows what each word is for."""
    commands = list(top.walk())
    paths = " ".join(_fish_quoted(_path(command)) for command in commands if command.words)
    lines = [line for command in commands for line in _fish_lines(command)]
    return _FISH.format(paths=paths) + "\n".join(lines) + "\n"


_SCRIPTS: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _path(command: Command) -> str:
    return "".join(f" {word}" for word in command.words)


def _words(command: Command) -> Iterator[str]:
    for below in command.below:
        yield below.words[-1]
    for argument in command.arguments:
        yield from argument.names or argument.choices


def _fish_lines(command: Command) -> Iterator[str]:
    begin = (
        f"complete -c tidemark -n {_fish_quoted(f'__tidemark_at {_fish_quoted(_path(command))}')}"
    )
    for below in command.below:
        yield f"{begin} -f -a {below.words[-1]} -d {_fish_quoted(below.text)}"
    for argument in command.arguments:
        chosen = f" -a {_fish_quoted(' '.join(argument.choices))}" if argument.choices else ""
        needs = f" -x{chosen}" if argument.choices else " -r" if argument.value else ""
        flags = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            for name in argument.names
        )
        if flags or chosen:
            value = f"{flags}{needs}" if flags else f"-f{chosen}"
            yield f"{begin} {value} -d {_fish_quoted(argument.text.partition(' (default')[0])}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
