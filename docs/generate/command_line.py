"""The page of commands, verbs and flags, made of the parsers."""

from collections.abc import Iterator

from server.cli.completion import Argument, Command

_HEAD = """# Command line

What `tidemark COMMAND … --help` says. The flags of daemons are their [settings](settings.md), and
are listed there. Exit status: 0 done, 1 an error that was printed with its [code](errors.md),
2 wrong usage.
"""
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
