"""`tidemark completion bash|zsh|fish`: a script by which the shell completes commands, verbs, flags
and their choices.

The script has all words in it, so that no key press waits for Python. We keep argparse rather than
click or typer: their completion starts the program at each key press, and the whole command line
here takes seconds to import, while one group takes a tenth of one.
"""

from collections.abc import Callable, Iterator, Sequence
from shlex import quote

from server.cli.commands import Command, completion_parser, tidemark
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
